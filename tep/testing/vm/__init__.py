"""A small virtual machine with software RDMA NICs, so that real libibverbs runs on any Linux host.

Soft-RoCE (rdma_rxe) is a kernel module; few test machines can load one. A guest can: qemu's
emulation boots Debian's stock kernel in some seconds, without KVM and without root's help, and the
guest sees this machine's own files, so the same Python, checkout and libibverbs run in it.
"""

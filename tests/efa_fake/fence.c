/* Stands before libc (LD_PRELOAD) and tells the fake device of a program's store fences (mapped.c).
 *
 * tep's fence on x86-64 is pthread_spin_trylock on a lock that is taken: one locked instruction.
 */
#include <errno.h>
#include <pthread.h>
#include <stddef.h>

void (*fake_efa_fence_hook)(void);

int pthread_spin_trylock(pthread_spinlock_t *lock)
{
	int expected = 0;

	if (fake_efa_fence_hook)
		fake_efa_fence_hook();
	return __atomic_compare_exchange_n(lock, &expected, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)
		       ? 0
		       : EBUSY;
}

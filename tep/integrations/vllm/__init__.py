"""A KV connector for vLLM: prefill instances send KV blocks to decode instances by tep.

vLLM loads it by `kv_connector_module_path="tep.integrations.vllm.connector"` and
`kv_connector="TepConnector"`. Only `connector` imports vLLM; see README.md.
"""

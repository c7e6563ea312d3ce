"""Weights from trainers to inference engines of others, on tep.apps.rl: vLLM, verl, NeMo-RL.

`vllm_engine`, `verl_engine` and `nemo_engine` are thin and import what they are made for; nothing
else here does. See README.md.
"""

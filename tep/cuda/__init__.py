"""GPU memory for engines, on cuda-python (`pip install 'tep[cuda]'`), which is imported when used.

No torch is needed. None of it has run on a GPU yet; scripts/gpu_check runs it on one.
"""

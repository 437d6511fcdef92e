"""The command ``vllm-spac``: one file per sub-command. None imports torch or vLLM at start-up."""

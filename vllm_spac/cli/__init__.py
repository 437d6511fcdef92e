"""The command ``vllm-spac``: one file a sub-command. None of them imports torch or vLLM when it starts."""

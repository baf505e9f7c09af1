"""litellm (the SDK): completion, stream."""

import os
import sys
from importlib.metadata import version

# Else it looks for the model's tokenizer and for prices on the internet.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

hello = [{"role": "user", "content": "Hello"}]
target = {"model": f"hosted_vllm/{sys.argv[2]}", "api_base": f"{sys.argv[1]}/v1"}
answer = litellm.completion(messages=hello, max_tokens=8, **target)
assert answer.usage.completion_tokens == 8
assert list(litellm.completion(messages=hello, max_tokens=8, stream=True, **target))
print(version("litellm"), "completion, stream", sep="|")

"""pydantic-ai: an agent's run."""

import sys
from importlib.metadata import version

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
agent = Agent(OpenAIChatModel(sys.argv[2], provider=provider), model_settings={"max_tokens": 8})
assert agent.run_sync("Hello").output
print(version("pydantic-ai-slim"), "an agent's run", sep="|")

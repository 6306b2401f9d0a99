"""Scripts that use a served deployment by other people's clients, in an environment of their own (`make clients`).

`tests/engines/test_clients.py` runs each as `SCRIPT URL MODEL MODEL_PATH`. A script fails if the client raises an error
or reads something else than was served.

with_openai.py     OpenAI's: chats, streams, tools, structured output, responses, models, errors
with_anthropic.py  Anthropic's: messages, streams, tools, counts, errors
with_litellm.py    litellm: by OpenAI's and by Anthropic's API, many at once with some that leave
with_langchain.py  langchain-openai: chats, streams, structured output, tools
with_lm_eval.py    lm-eval: log-likelihoods and answers of a task in a local file
"""

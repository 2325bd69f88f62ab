"""ChatML, for models without a chat template of their own.

Beside the floors. Standard library only; imports nothing of ours.
"""

from __future__ import annotations

from typing import Any

# Between {% generation %} and {% endgeneration %} stands what is learned: the answer and its end. A tokenizer
# without ChatML's tokens writes its own end of text behind, so that the trained model knows where to stop.
CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] + '<|im_end|>' + END -}}
{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def chatml(tokenizer: Any) -> str:
    """ChatML for this tokenizer."""
    known = "<|im_end|>" in tokenizer.get_vocab()
    return CHATML.replace(" + END", "" if known else " + eos_token")

"""The preset for LM Studio: a golden text. It was not run with LM Studio."""

from types import SimpleNamespace

from backend.export import lm_studio

EXPECTED = """\
{
  "identifier": "@local:first-run-q4_k_m",
  "name": "first-run-q4_k_m",
  "changed": false,
  "operation": {
    "fields": [
      {
        "key": "llm.prediction.promptTemplate",
        "value": {
          "type": "jinja",
          "jinjaPromptTemplate": {
            "template": "{% for m in messages %}{{ m.content }}<|im_end|>\\n{% endfor %}"
          },
          "stopStrings": [
            "<|im_end|>"
          ]
        }
      },
      {
        "key": "llm.prediction.systemPrompt",
        "value": "Réponds."
      }
    ]
  },
  "load": {
    "fields": []
  }
}
"""


def test_the_preset():
    tokenizer = SimpleNamespace(chat_template="{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}")
    several = SimpleNamespace(chat_template={"tool_use": "?", "default": tokenizer.chat_template})
    assert lm_studio.write("a", several, ["</s>"]) == lm_studio.write("a", tokenizer, ["</s>"])
    assert lm_studio.write("first-run-q4_k_m", tokenizer, ["<|im_end|>"], "Réponds.") == EXPECTED
    assert "systemPrompt" not in lm_studio.write("a", tokenizer, ["<|im_end|>"])
    assert lm_studio.write("a", SimpleNamespace(chat_template=None), ["</s>"]) == ""

"""Short chat templates in the styles of published models."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ message['role'] }}\n{{ first }}{{ message['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Reads strings of the system, and strings or parts of others.
PIXTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST]"
    "{% if system is defined %}{{ system }}\n\n{% endif %}"
    "{% if message['content'] is not string %}{% for chunk in message['content'] %}"
    "{% if chunk['type'] == 'text' %}{{ chunk['text'] }}{% endif %}{% endfor %}"
    "{% else %}{{ message['content'] }}{% endif %}[/INST]{% endif %}{% endfor %}"
)
QWEN_VL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image_url' in content %}<|image_pad|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}<|im_start|>assistant\n"
)
GEMMA_3 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% if messages[0]['content'] is string %}{% set first = messages[0]['content'] + '\\n' %}"
    "{% else %}{% set first = messages[0]['content'][0]['text'] + '\\n' %}{% endif %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}<start_of_turn>{{ message['role'] }}\n"
    "{{ first if loop.first else '' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% elif message['content'] is iterable %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<start_of_image>"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}"
    "{% else %}{{ raise_exception('Invalid content type') }}{% endif %}<end_of_turn>\n"
    "{% endfor %}<start_of_turn>model\n"
)
LLAMA_4 = (
    "{{ bos_token }}{% for message in messages %}<|header_start|>{{ message['role'] }}"
    "<|header_end|>\n\n{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}<|image|>"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|eot|>{% endfor %}<|header_start|>assistant<|header_end|>\n\n"
)
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{{ message['role'] | upper + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n"
    "{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}ASSISTANT:"
)
# Macros that read strings and parts, and parts alone.
GLM = (
    "{% macro visible_text(content) %}{% if content is string %}{{ content }}"
    "{% elif content is iterable and content is not mapping %}{% for item in content %}"
    "{% if item is mapping and item.type == 'text' %}{{ item.text }}"
    "{% elif item is string %}{{ item }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "[gMask]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ visible_text(m.content) }}"
    "{% endfor %}<|assistant|>\n"
)
KIMI = (
    "{% macro render(msg) %}{% set c = msg.get('content') %}{% if c is string %}{{ c }}"
    "{% else %}{% for part in c %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}<|im_{{ message['role'] }}|>{{ render(message) }}<|im_end|>"
    "{% endfor %}<|im_assistant|>"
)
PARTS_MACRO = (
    "{% macro show(body, end='') %}{% for part in body %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}{{ end }}{% endmacro %}"
    "{% for message in messages %}{{ message.role }}: {{ show(body=message.content, end='\n') }}"
    "{% endfor %}"
)

STRING_STYLES = {"chatml": CHATML, "llama3": LLAMA_3, "gemma": GEMMA, "mistral": MISTRAL}
BOTH_STYLES = {
    "pixtral": PIXTRAL,
    "qwen-vl": QWEN_VL,
    "gemma3": GEMMA_3,
    "llama4": LLAMA_4,
    "glm": GLM,
    "kimi": KIMI,
}
PARTS_STYLES = {"smolvlm": SMOLVLM, "llava": LLAVA, "macro": PARTS_MACRO}

"""How tests run commands: files of prompts, and what is checked of every refusal."""

import json


def write_prompts(file, texts, key="prompt", **others):
    """Write a file of prompts; returns it."""
    lines = ({key: text, **others} for text in texts)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def assert_refused(ran, begin):
    """A command printed nothing but an error, whose line begins with a flag."""
    status, out, err = ran
    assert (status, out) == (2, ""), (begin, out)
    assert err.splitlines()[-1].startswith(f"error {begin}"), (begin, err)
    assert "Traceback" not in err

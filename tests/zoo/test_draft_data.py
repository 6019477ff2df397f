import json

from draftwise.zoo.corpus import Document, read_documents
from draftwise.zoo.draft_data import PROMPTS_FILE, TEXTS_FILE, main, prompts, texts

CHARACTERS = 200_000


def test_prompts_are_questions_of_training_documents(data):
    found = prompts(data)
    assert len(set(found)) == len(found) > 300
    assert not any(Document("", question, "").is_held_out for question in found)
    answers = [document.text.partition("Answer:")[2] for document in read_documents("gsm8k", data)]
    assert not any(answer in question for answer in answers for question in found if answer)


def test_texts_are_beginnings_of_training_documents(data):
    found = texts(data, CHARACTERS)
    total = sum(map(len, found))
    assert CHARACTERS <= total < CHARACTERS + 6_000
    held_out = [
        document.text[:6_000]
        for source in ("stdlib", "docs")
        for document in read_documents(source, data)
        if document.is_held_out
    ]
    assert held_out
    assert not set(held_out) & set(texts(data, 10**9))


def test_seed_chooses_the_texts(data):
    assert texts(data, CHARACTERS) == texts(data, CHARACTERS)
    assert texts(data, CHARACTERS, seed=1) != texts(data, CHARACTERS)


def test_files(data, tmp_path):
    main(["--data", str(data), "-o", str(tmp_path / "new"), "--characters", str(CHARACTERS)])
    written = {
        name: [json.loads(line) for line in (tmp_path / "new" / name).read_text().splitlines()]
        for name in (PROMPTS_FILE, TEXTS_FILE)
    }
    assert written[PROMPTS_FILE] == [{"prompt": each} for each in prompts(data)]
    assert written[TEXTS_FILE] == [{"text": each} for each in texts(data, CHARACTERS)]

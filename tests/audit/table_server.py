"""A server without a network whose model is a table, with right and wrong speculation.

The distribution of the next token depends on the prompt and on the last two tokens. Words of the
table at the end of a prompt are tokens, so that the server can read its own answers. Speculative
sampling is written here from its equations (Leviathan et al. 2023), not with Draftwise's code.
"""

import json
import math
import random
import zlib
from functools import lru_cache

import httpx

WORDS = (" a", " b", " c", " d", " e", " f", " g", " h", " i", " j", "\n", "</s>")
END = len(WORDS) - 1
LISTED = 8
SHARPNESS, NOISE = 1.6, 1.0
KNOWN = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed"),
    *("stop", "logprobs", "stream", "stream_options", "speculation", "logit_bias"),
    *("presence_penalty", "frequency_penalty"),
}
# The wrong servers of the tests.
WRONG = ("residual", "lenience", "top-p", "prefix", "stop")


@lru_cache(None)
def log_p(context, is_draft):
    """Log-probabilities of the next token; those of the draft differ by noise."""
    rng = random.Random(zlib.crc32(repr(context).encode()))
    scores = [rng.gauss(0, SHARPNESS) for _ in WORDS]
    scores[END] = -2.5
    if is_draft:
        scores = [score + rng.gauss(0, NOISE) for score in scores]
    log_sum = math.log(sum(map(math.exp, scores)))
    return tuple(score - log_sum for score in scores)


def scores_after(context, tokens, is_draft=False, reading=0.0):
    """Log-probabilities after a prompt and tokens.

    Args:
        context: the prompt, and the words of the table at its end.
        tokens: tokens of the answer.
        is_draft: whether they are those of the draft.
        reading: what rounding adds if the last token was read in one pass with others.
    """
    prompt, read = context
    state = (prompt, *[*read, *tokens][-2:])
    own = list(log_p(state, is_draft))
    if reading and not is_draft:
        rng = random.Random(zlib.crc32(repr(("read", state)).encode()))
        own = [score + rng.gauss(0, reading) for score in own]
        log_sum = math.log(sum(map(math.exp, own)))
        own = [score - log_sum for score in own]
    return own


class Sampler:
    """The distributions of one answer."""

    def __init__(self, body, reading=0.0):
        self.reading = reading
        self.speculates = body.get("speculation", {}).get("enabled", True)
        self.temperature = body.get("temperature", 1.0)
        self.top_k, self.top_p = body.get("top_k", 0), body.get("top_p", 1.0)
        self.presence = body.get("presence_penalty", 0.0)
        self.frequency = body.get("frequency_penalty", 0.0)
        self.bias = {int(token): bias for token, bias in body.get("logit_bias", {}).items()}

    def scores(self, context, tokens, is_draft=False):
        is_read = bool(tokens) if self.speculates else not tokens and context[1]
        return scores_after(context, tokens, is_draft, self.reading if is_read else 0.0)

    def probabilities(self, context, tokens, is_draft=False, top_p=True):
        scores = self.scores(context, tokens, is_draft)
        for token, bias in self.bias.items():
            scores[token] += bias
        if self.presence or self.frequency:
            for token in set(tokens):
                scores[token] -= self.presence + self.frequency * tokens.count(token)
        if not self.temperature:
            best = max(scores)
            return [float(score == best) for score in scores]
        weights = [math.exp(score / self.temperature) for score in scores]
        order = sorted(range(len(weights)), key=lambda token: -weights[token])
        if self.top_k > 0:
            for token in order[self.top_k :]:
                weights[token] = 0.0
        if top_p and self.top_p < 1:
            total, mass = sum(weights), 0.0
            for token in order:
                if mass >= self.top_p:
                    weights[token] = 0.0
                mass += weights[token] / total
        total = sum(weights)
        return [weight / total for weight in weights]


class TableServer(httpx.MockTransport):
    """The server, as a transport of httpx.

    Attributes:
        wrong: what is wrong with its speculation; ``None`` for nothing.
        bias: total variation by which speculation changes the distribution of sampled answers.
        reading: standard deviation of what reading tokens in one pass, in a prompt or to verify
            them, adds to scores.
        num_requests: requests for answers.
    """

    def __init__(self, wrong=None, seed=0, num_drafted=3, listed=LISTED, rounding=0.0, bias=0.0,
        reading=0.0,
    ):  # fmt: skip
        super().__init__(self.respond)
        self.wrong, self.rng, self.num_drafted = wrong, random.Random(seed), num_drafted
        self.listed, self.rounding, self.bias, self.reading = listed, rounding, bias, reading
        self.num_requests = 0
        self.first_lines = {}

    def respond(self, request):
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "table", "owned_by": "tests"}]})
        if path == "/v1/speculation":
            return httpx.Response(200, json={"policy": "fixed"})
        body = json.loads(request.content or "{}")
        if path == "/tokenize":
            return httpx.Response(200, json={"tokens": token_ids(body["prompt"])})
        if path != "/v1/completions":
            return httpx.Response(404, json={"error": {"message": "no such path"}})
        unknown = set(body) - KNOWN
        if unknown or (body.get("logprobs") and not self.listed):
            return httpx.Response(400, json={"error": {"message": f"unknown: {unknown}"}})
        self.num_requests += 1
        content = self.answer(body)
        if not body.get("stream"):
            return httpx.Response(200, json=content)
        choice = content["choices"][0]
        text, pieces = choice["text"], []
        for start in range(0, len(text), 3):
            pieces.append({"choices": [{"index": 0, "text": text[start : start + 3]}]})
        last = {"index": 0, "text": "", "finish_reason": choice["finish_reason"]}
        pieces += [{"choices": [last]}, {"choices": [], "usage": content["usage"]}]
        lines = [f"data: {json.dumps(piece)}\n\n" for piece in pieces]
        return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))

    def answer(self, body):
        speculates = body.get("speculation", {}).get("enabled", True)
        prompt, count = body["prompt"], body.get("n", 1)
        before, read = split(prompt)
        context = zlib.crc32(before.encode()), read
        first_line, has_more, _ = prompt.partition("\n")
        if has_more:
            earlier = self.first_lines.setdefault(first_line, context)
            if self.wrong == "prefix" and speculates:
                context = earlier
        choices, num_tokens, drafts = [], 0, [0, 0]
        for index in range(count):
            rng = random.Random(body["seed"] + index) if "seed" in body else self.rng
            tokens = self.tokens(body, context, speculates, rng, drafts)
            choice, length = self.choice(body, context, tokens, speculates)
            choices.append({"index": index, **choice})
            num_tokens += length
        num_prompt_tokens = len(token_ids(prompt))
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "speculation": {"num_verified": drafts[0], "num_accepted": drafts[1]},
        }
        return {"choices": choices, "usage": usage}

    def tokens(self, body, context, speculates, rng, drafts):
        """Draw all tokens of an answer, up to its end."""
        sampler, tokens, limit = Sampler(body, self.reading), [], body["max_tokens"]
        while len(tokens) < limit and END not in tokens:
            drafted = []
            if speculates and tokens:  # the prompt's pass gives the first token
                for _ in range(min(self.num_drafted, limit - len(tokens) - 1)):
                    q = self.filtered(sampler, context, tokens + drafted, True)
                    drafted.append(drawn(q, rng))
            if speculates and self.bias and sampler.temperature and not tokens:
                tokens.append(drawn(tilted(sampler.probabilities(context, []), self.bias), rng))
                continue
            tokens += self.verified(sampler, context, tokens, drafted, rng, drafts)
        if END in tokens:
            tokens = tokens[: tokens.index(END) + 1]
        return tokens[:limit]

    def verified(self, sampler, context, tokens, drafted, rng, drafts):
        kept = []
        drafts[0] += len(drafted)
        for token in drafted:
            p = self.filtered(sampler, context, tokens + kept, False)
            q = self.filtered(sampler, context, tokens + kept, True)
            ratio = p[token] / q[token]
            if self.wrong == "lenience" and sampler.temperature:
                ratio /= 0.9
            if rng.random() >= ratio:
                residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
                if self.wrong == "residual" and sampler.temperature:
                    residual = p
                if self.wrong == "top-p":
                    allowed = sampler.probabilities(context, tokens + kept)
                    residual = [a * (b > 0) for a, b in zip(residual, allowed, strict=True)]
                return [*kept, drawn(residual if sum(residual) > 0 else p, rng)]
            kept.append(token)
            drafts[1] += 1
        return [*kept, drawn(sampler.probabilities(context, tokens + kept), rng)]

    def filtered(self, sampler, context, tokens, is_draft):
        """The distribution of the acceptance test."""
        return sampler.probabilities(context, tokens, is_draft, top_p=self.wrong != "top-p")

    def choice(self, body, context, tokens, speculates):
        """The choice for these tokens, and how many of them are counted."""
        shown = [token for token in tokens if token != END]
        text, reason = "".join(WORDS[token] for token in shown), "length"
        if len(shown) < len(tokens):
            reason = "stop"
        for stop in body.get("stop", ()):
            place = text.find(stop)
            if place >= 0:
                length = 0
                while len("".join(WORDS[token] for token in tokens[:length])) < place + len(stop):
                    length += 1
                tokens, reason = tokens[:length], "stop"
                text = text[: place + (self.wrong == "stop" and speculates)]
        choice = {"text": text, "finish_reason": reason, "logprobs": None}
        if body.get("logprobs"):
            choice["logprobs"] = self.logprobs(body, context, tokens)
        return choice, len(tokens)

    def logprobs(self, body, context, tokens):
        scores, tops, sampler = [], [], Sampler(body, self.reading)
        for position, token in enumerate(tokens):
            own = sampler.scores(context, tokens[:position])
            own = [score + self.rng.gauss(0, self.rounding) for score in own]
            best = sorted(range(len(own)), key=lambda each: -own[each])
            listed = {token, *best[: min(body["logprobs"], self.listed)]}
            scores.append(own[token])
            tops.append({WORDS[each]: own[each] for each in listed})
        texts = [WORDS[token] for token in tokens]
        return {"tokens": texts, "token_logprobs": scores, "top_logprobs": tops}


def drawn(weights, rng):
    number = rng.random() * sum(weights)
    for token, weight in enumerate(weights):
        number -= weight
        if number < 0:
            return token
    return max(range(len(weights)), key=lambda token: weights[token])


def tilted(p, bias):
    """A distribution whose total variation from another is the bias, and hard to tell from it.

    About half of the probability grows, and the rest shrinks, by a factor each.
    """
    grows, mass = set(), 0.0
    for cell in sorted(range(len(p)), key=lambda cell: -p[cell]):
        if not grows or mass + p[cell] <= 0.5:
            grows.add(cell)
            mass += p[cell]
    moved = min(bias, 1 - mass)
    up, down = 1 + moved / mass, 1 - moved / (1 - mass) if mass < 1 else 1.0
    return [each * (up if cell in grows else down) for cell, each in enumerate(p)]


def split(prompt):
    """A prompt without the words of the table at its end, and these as tokens."""
    read = []
    while prompt[-2:] in WORDS:
        read.insert(0, WORDS.index(prompt[-2:]))
        prompt = prompt[:-2]
    return prompt, tuple(read)


def token_ids(text):
    """One token for each word; words of answers have the numbers of the table."""
    first, *others = text.split(" ")
    known = {word: index for index, word in enumerate(WORDS)}
    return [100 + len(first), *(known.get(f" {word}", 100 + len(word)) for word in others)]

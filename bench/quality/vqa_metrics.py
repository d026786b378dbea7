"""What published tables of visual question answering report: ANLS of DocVQA, and accuracy of TextVQA and VQAv2."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from gpu_lod.errors import InputError

Metric = Callable[[str, Sequence[str]], float]
"""(what was answered, what people answered) to a score in [0, 1]."""

_NUMBERS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
_ARTICLES = {"a", "an", "the"}
_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_FULL_STOP = re.compile(r"\.(?!\d)")
_COMMA_IN_NUMBER = re.compile(r"\d,+\d")

# What the evaluation puts apostrophes back into: each of these without one of its apostrophes.
_APOSTROPHES = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
    o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
    someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've
    there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's
    what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
    wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
_CONTRACTIONS = {
    word[:at] + word[at + 1 :]: word for word in _APOSTROPHES.split() for at, letter in enumerate(word) if letter == "'"
} | {"somebody'd": "somebodyd"}  # as published


def anls(answer: str, answers: Sequence[str], threshold: float = 0.5) -> float:
    """Normalised Levenshtein similarity to the nearest answer, 0 where it is below the threshold.

    Convention: lower case and single spaces; the distance is over the longer of the two as they were given. At the
    threshold itself the similarity counts, as in the evaluation server; in the paper it is 0.

    Raises:
        InputError: no answers.

    Source: Biten et al., "Scene Text Visual Question Answering" (2019); the evaluation of DocVQA.
    """
    distances = []
    for expected in _checked(answers):
        longer = max(len(expected), len(answer))
        distance = edit_distance(" ".join(expected.lower().split()), " ".join(answer.lower().split()))
        distances.append(distance / longer if longer else 0.0)
    similarity = 1 - min(distances)
    return similarity if similarity >= threshold else 0.0


def edit_distance(first: str, second: str) -> int:
    """Levenshtein's: insertions, deletions and replacements."""
    row = list(range(len(second) + 1))
    for i, one in enumerate(first, 1):
        above, row = row, [i]
        for j, other in enumerate(second, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (one != other)))
    return row[-1]


def vqa_accuracy(answer: str, answers: Sequence[str]) -> float:
    """Accuracy of VQAv2: min(1, those who answered so / 3), the mean over all ways to leave one person out.

    Convention: `normalised` answers, always; the code of 2015 left them as they were where all people agreed, the
    evaluation server and lmms-eval do not.

    Raises:
        InputError: no answers.

    Source: Antol et al., "VQA: Visual Question Answering" (2015); Goyal et al. (2017).
    """
    return _agreement(normalised(answer), [normalised(expected) for expected in _checked(answers)])


def textvqa_accuracy(answer: str, answers: Sequence[str]) -> float:
    """Accuracy of TextVQA: that of VQAv2, with commas and question marks left out, and 's a word of its own, before
    answers are normalised.

    Raises:
        InputError: no answers.

    Source: Singh et al., "Towards VQA Models That Can Read" (2019).
    """
    return _agreement(_words(answer), [_words(expected) for expected in _checked(answers)])


def _words(text: str) -> str:
    return normalised(text.lower().replace(",", "").replace("?", "").replace("'s", " 's"))


def normalised(text: str) -> str:
    """An answer as the evaluation of VQA compares it: no punctuation, digits for numbers up to ten, no articles, and
    the apostrophes of contractions in their places.

    Convention: a mark becomes a space, or nothing where it stands beside a space or the text has a comma in a number.
    """
    text = text.replace("\n", " ").replace("\t", " ").strip()
    number = _COMMA_IN_NUMBER.search(text) is not None
    found = text
    for mark in _MARKS:
        beside = mark + " " in text or " " + mark in text
        found = found.replace(mark, "" if beside or number else " ")
    found = _FULL_STOP.sub("", found, count=32)  # the code of 2015 passes re.UNICODE, 32, for the count
    words = (_NUMBERS.get(word, word) for word in found.lower().split())
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def _agreement(answer: str, answers: Sequence[str]) -> float:
    same, people = answers.count(answer), len(answers)
    # Who answered so leaves same - 1 of them when left out, anybody else all.
    return (same * min(1.0, (same - 1) / 3) + (people - same) * min(1.0, same / 3)) / people


def _checked(answers: Sequence[str]) -> Sequence[str]:
    if isinstance(answers, str) or not answers:
        raise InputError(f"answers are {answers!r}; expected a list of what people answered, at least one.")
    return answers


METRICS: dict[str, Metric] = {"anls": anls, "textvqa_accuracy": textvqa_accuracy, "vqa_accuracy": vqa_accuracy}

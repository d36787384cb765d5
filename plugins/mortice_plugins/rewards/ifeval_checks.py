r"""The 25 kinds of verifiable instructions of IFEval: each a function of the answer's text and its arguments.

Zhou et al., "Instruction-Following Evaluation for Large Language Models", 2023 (arXiv:2311.07911). What counts is as in
its published evaluation, with two differences: sentences are told apart by a rule of our own (`sentences`), since the
published one goes by a trained model, and so are the words of `capital_words`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mortice.errors import ConfigError, DataError, suggest

Check = Callable[..., bool]

CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_ABBREVIATIONS = {
    "mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "inc", "ltd", "co", "corp", "fig", "no", "approx",
    "e.g", "i.e", "a.m", "p.m", "u.s", "u.k", "ph.d",
}  # fmt: skip
_END = re.compile(r"""([.!?…]+)["'”’)\]*_]*(?=\s|$)""")
_WORD = re.compile(r"[^\W_]+(?:[-./&'’][^\W_]+)*")


def sentences(text: str) -> list[str]:
    """Sentences: up to ".", "!" or "?" before white space, unless the dot ends an initial or an abbreviation. A line
    without one is no sentence of its own."""
    found, start = [], 0
    for match in _END.finditer(text):
        before = text[start : match.start()].split()
        last = before[-1].lower().lstrip("\"'“‘([*_") if before else ""
        if match.group(1) == "." and (last in _ABBREVIATIONS or (len(last) == 1 and last.isalpha() and last != "i")):
            continue
        found.append(text[start : match.end()].strip())
        start = match.end()
    rest = text[start:].strip()
    return [sentence for sentence in (*found, rest) if sentence]


def compared(count: int, relation: str, wanted: int) -> bool:
    """Whether a count is "less than" or "at least" a number. Raises DataError for another relation."""
    if relation == "less than":
        return count < wanted
    if relation == "at least":
        return count >= wanted
    raise DataError(f'relation must be "less than" or "at least", found {relation!r}')


def language(text: str) -> str | None:
    """The language that a text is most likely in (ISO 639-1), None where it holds nothing to go by.

    Raises ConfigError where langdetect is not installed.
    """
    try:
        import langdetect
    except ImportError as error:
        raise ConfigError(
            "IFEval tells languages apart with langdetect; install it: pip install 'mortice[eval]'"
        ) from error
    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


def in_language(text: str, wanted: str) -> bool:
    """A text with nothing to go by counts as of any language."""
    return language(text) in (wanted, None)


def response_language(text: str, language: str) -> bool:
    return in_language(text, language)


def keywords(text: str, keywords: Sequence[str]) -> bool:
    """All of them are there, in any case; each is a pattern."""
    return all(re.search(word, text, re.IGNORECASE) for word in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return compared(len(re.findall(keyword, text, re.IGNORECASE)), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None is there as a whole word."""
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compared(text.lower().count(letter.lower()), let_relation, let_frequency)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs parted by "***"; only the first and the last may be empty, and then do not count."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    if any(not part.strip() for part in parts[1:-1]):
        return False
    return sum(bool(part.strip()) for part in parts) == num_paragraphs


def number_words(text: str, num_words: int, relation: str) -> bool:
    return compared(len(re.findall(r"\w+", text)), relation, num_words)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return compared(len(sentences(text)), relation, num_sentences)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """So many paragraphs, parted by an empty line, and the n-th begins with the word."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return count == num_paragraphs and re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """At least so many [placeholders]."""
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    dots = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(dots.get(postscript_marker, re.escape(postscript_marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Exactly so many lines that begin with "* " or "-"."""
    lines = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE) + re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(lines) == num_bullets


def constrained_response(text: str) -> bool:
    return any(answer in text for answer in CONSTRAINED)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """At least so many *highlights* or **highlights** that are not empty. As published, a double one counts for each
    way in which it can be read."""
    single = [x for x in re.findall(r"\*[^\n*]*\*", text) if x.strip("*").strip()]
    double = [x for x in re.findall(r"\*\*[^\n*]*\*\*", text) if x[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each headed by the word and a number."""
    return len(re.findall(rf"\s?{section_spliter}\s?\d+\s?", text)) >= num_sections


def json_format(text: str) -> bool:
    """The whole is JSON, in a fence or not."""
    plain = re.sub(r"^```(?:json|Json|JSON)?", "", text.strip()).removesuffix("```")
    try:
        json.loads(plain.strip())
    except ValueError:
        return False
    return True


def title(text: str) -> bool:
    """Something stands in <<double angular brackets>>."""
    return any(found.lstrip("<").rstrip(">").strip() for found in re.findall(r"<<[^\n]+>>", text))


def two_responses(text: str) -> bool:
    """Two that differ, parted by "******"."""
    parts = text.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    found = [part.strip() for part in parts if part.strip()]
    return len(found) == 2 and found[0] != found[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """The whole stands in double quotation marks."""
    plain = text.strip()
    return len(plain) > 1 and plain[0] == plain[-1] == '"'


def capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    found = [word for word in _WORD.findall(text) if word.isupper()]
    return compared(len(found), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper() and in_language(text, "en")


def english_lowercase(text: str) -> bool:
    return text.islower() and in_language(text, "en")


def no_comma(text: str) -> bool:
    return "," not in text


CHECKS: dict[str, Check] = {
    "keywords:existence": keywords,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_words,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}


def instructions(record: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of a record's `instruction_id_list` and `kwargs`. Raises DataError for what is wrong."""
    names, arguments = record.get("instruction_id_list"), record.get("kwargs")
    if not isinstance(names, list) or not names or not isinstance(arguments, list) or len(names) != len(arguments):
        raise DataError("a record needs 'instruction_id_list' and 'kwargs', two lists of one length")
    found = []
    for name, own in zip(names, arguments):
        if name not in CHECKS:
            raise DataError(f"unknown instruction {name!r}{suggest(str(name), CHECKS)}")
        if not isinstance(own, Mapping):
            raise DataError(f"kwargs of {name} must be an object, found {own!r}")
        found.append((name, {key: value for key, value in own.items() if value is not None}))
    return found


def followed(text: str, record: Mapping[str, Any]) -> list[bool]:
    """Whether each instruction of the record is followed, strictly. An empty answer follows none.

    Raises DataError for a record whose instructions cannot be checked.
    """
    return [bool(text.strip()) and _checked(name, text, own) for name, own in instructions(record)]


def followed_loosely(text: str, record: Mapping[str, Any]) -> list[bool]:
    """The same, where it is enough that one of eight versions of the answer follows an instruction: as it is, without
    its first line, its last one, or both, each also without asterisks."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    versions = [version for each in cut for version in (each, each.replace("*", "")) if version.strip()]
    return [any(_checked(name, version, own) for version in versions) for name, own in instructions(record)]


def _checked(name: str, text: str, arguments: Mapping[str, Any]) -> bool:
    try:
        return CHECKS[name](text, **arguments)
    except TypeError as error:
        raise DataError(f"kwargs of {name}: {str(error).partition('() ')[2] or error}") from error

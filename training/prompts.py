"""Prompts for chat models, and text that is installed: what a target is asked to go on from.

Prompts are all pairs of a task and a topic. Those of the last topics, and one document in
`HELD_OUT_EVERY`, are for evaluation alone. Nothing is downloaded.
"""

import ast
import os
import random
import sysconfig
from pathlib import Path
from typing import NamedTuple

import stdlib_text

HELD_OUT_EVERY = 20
NUM_HELD_OUT_TOPICS = 8
LEAST_CHARACTERS, MOST_CHARACTERS = 300, 20_000  # of a document
MOST_DOCUMENTS = 1500  # of each kind

TOPICS = """
the water cycle; photosynthesis; black holes; plate tectonics; the human heart; vaccines;
antibiotics; sleep; electric cars; solar panels; bicycles; sailing ships; bridges; the printing
press; paper; glass; steel; plastics; bread; coffee; chocolate; rice; apples; cheese; soup;
salads; gardening; compost; bees; whales; wolves; owls; coral reefs; deserts; rainforests;
glaciers; volcanoes; earthquakes; the moon; Mars; comets; telescopes; the Roman Empire; ancient
Egypt; the Silk Road; the Vikings; the Renaissance; the French Revolution; trade unions;
democracy; taxes; inflation; banks; insurance; small businesses; online shops; job interviews;
remote work; meetings; public speaking; learning a language; reading; writing a diary; poetry;
short stories; theatre; jazz; the piano; photography; painting; chess; football; swimming;
running; yoga; hiking; camping; train travel; airports; hotels; museums; libraries; schools;
homework; exams; friendship; families; dogs; cats; moving house; saving money; cooking; first aid;
back pain; allergies; stress; time zones; calendars; maps; the metric system; prime numbers;
fractions; probability; statistics; geometry; graphs; logic puzzles; databases; web browsers;
passwords; email; backups; operating systems; compilers; sorting; recursion; hash tables; linked
lists; text files; regular expressions; unit tests; version control; search engines; neural
networks; robots; batteries; satellites; the internet; rainbows; snow; tides; wind power;
recycling; city parks; traffic; weather forecasts; mountain villages; islands
"""
TASKS = """
Explain {} to a child.
Explain {} in detail.
What is the most important thing to know about {}?
What do you know about {}?
Why are people interested in {}?
How did our understanding of {} change over time?
Give me five facts about {}.
List ten words that have to do with {}, with a short explanation of each.
Write a short story about {}.
Write a poem about {}.
Write a dialogue between a teacher and a student about {}.
Write an email to a colleague about {}.
Write a blog post with headings about {}.
Write a product description that mentions {}.
What are common mistakes when people talk about {}?
Compare {} with something else of your choice.
What are the advantages and disadvantages of {}?
I have to give a talk on {}. Help me with an outline.
Make a plan for one week to learn about {}.
Ask me three quiz questions about {}, then give the answers.
Can you recommend how to begin with {}?
Tell me a joke about {}.
Summarize what is known about {} in three sentences.
Write a news report about {}.
Write a Python function that has to do with {}, and explain it.
Write a Python class that models {}, with docstrings and type hints.
Write a small Python program about {} with a main function.
Write unit tests in Python for code about {}.
Write a JavaScript function about {}.
Write an HTML page about {}.
Write an SQL table and three queries for data about {}.
Give a JSON object that describes {}, with the keys "name", "summary" and "tags".
Return only JSON: a list of four objects about {}, each with "title", "year" and "description".
Fill this schema about {}: {{"title": string, "items": [{{"id": integer, "text": string}}]}}
Translate into French: "My sister has read a good book about {}, and she wants to know more."
Translate into German: "Yesterday we talked about {} for two hours."
Translate into Spanish: "I would like to learn something about {} before the summer."
Translate into Italian: "The teacher showed us pictures and told us a story about {}."
Say this more politely: "You know nothing about {}, so stop talking."
Correct the grammar: "He don't knows much on {} but he want to learned it."
A shop sells 12 books about {} for 7 dollars each. How much do 5 of them cost? Show your work.
""".strip().splitlines()

ABOUT_PASSAGES = """
Summarize the following text:
Summarize this in one sentence.
What are the main points of this text?
Rewrite this text in simple words:
List the key terms in this text, with their meaning.
Write a title for this text, and say why it fits:
Which questions does this text answer?
""".strip().splitlines()


class Documents(NamedTuple):
    """Texts of files."""

    code: list[str]  # Python source
    prose: list[str]  # documentation: .md and .rst files, descriptions of packages, docstrings


class Prompts(NamedTuple):
    """What to begin texts with."""

    chat: list[str]  # what a user says
    documents: list[str]


def read_documents(seed: int = 0, most: int = MOST_DOCUMENTS) -> Documents:
    """Reads documents of the standard library and of the packages beside this one, shuffled."""
    paths = sysconfig.get_paths()
    files = [
        Path(folder, name)
        for root in sorted({paths["purelib"], paths["platlib"]})
        for folder, _, names in os.walk(root)
        for name in names
        if "/test" not in folder and name.endswith((".py", ".md", ".rst", "METADATA"))
    ]
    order = random.Random(seed)
    code = [source.decode() for _, source in stdlib_text.read_text().library]
    code += _beginnings([path for path in files if path.suffix == ".py"], order, most)
    order.shuffle(code)
    code = code[:most]
    prose = _beginnings([path for path in files if path.suffix != ".py"], order, most)
    prose += [text for source in code[: most // 3] for text in _docstrings(source)]
    order.shuffle(prose)
    return Documents(code, prose[:most])


def _beginnings(files: list[Path], order: random.Random, most: int) -> list[str]:
    """Returns the beginnings of some files, at most `most`, that are text in UTF-8."""
    texts = []
    for path in order.sample(sorted(files), min(most, len(files))):
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_CHARACTERS)
        if len(text) > LEAST_CHARACTERS and "\ufffd" not in text:
            texts.append(text)
    return texts


def _docstrings(source: str) -> list[str]:
    """Returns the long docstrings of a module, its classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    try:
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    except SyntaxError:  # of another Python, or a beginning
        return []
    texts = [ast.get_docstring(node) or "" for node in nodes]
    return [text for text in texts if len(text) > LEAST_CHARACTERS]


def make_prompts(documents: Documents, *, held_out: bool, seed: int = 0) -> Prompts:
    """Returns all prompts for training, or those that are held out, shuffled.

    A third of the chat prompts are about a passage of the prose.
    """
    topics = " ".join(TOPICS.split()).split("; ")
    topics = topics[-NUM_HELD_OUT_TOPICS:] if held_out else topics[:-NUM_HELD_OUT_TOPICS]
    chat = [task.format(topic) for task in TASKS for topic in topics]
    own = Documents(
        *(
            [t for i, t in enumerate(texts) if (i % HELD_OUT_EVERY == 0) == held_out]
            for texts in documents
        )
    )
    order = random.Random(seed + 1)
    for _ in range(len(chat) // 2 if own.prose else 0):
        text = order.choice(own.prose)
        length = order.choice((400, 800, 1600))
        begin = order.randrange(max(1, len(text) - length))
        passage = text[begin : begin + length].partition("\n")[2] or text[:length]
        chat.append(f"{order.choice(ABOUT_PASSAGES)}\n\n{passage.strip()}")
    order.shuffle(chat)
    texts = [*own.code, *own.prose]
    order.shuffle(texts)
    return Prompts(chat, texts)

"""The prompts of `benches/speculation.py`: eight chats of each kind of work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TEXTS = (
    "The harbor of Lisse opens to the west, so the evening light reaches every pier. Fishing boats leave "
    "before four in the morning and return at noon with sardines, mackerel and, in spring, small squid. "
    "The market sells the catch by weight, and what is left at two goes to the cannery on the hill.",
    "A bicycle needs little care. Check the pressure of both tires every week, clean and oil the chain "
    "once a month, and replace the brake pads when less than three millimeters are left. Tighten the "
    "bolts of the stem and the saddle after the first hundred kilometers, because new parts settle.",
    "Our library opens at nine on weekdays and at ten on Saturdays. Members may borrow twelve books for "
    "four weeks and renew them twice. Films and games are lent for one week. Late returns cost twenty "
    "cents per day and item, up to ten euros. Children under twelve pay nothing.",
    "The orchard has forty apple trees in four rows. The first row has early apples that ripen in August, "
    "the second and third have cooking apples, and the last row keeps until March. Each tree is pruned in "
    "January and thinned in June, so that the fruit grows large and the branches do not break.",
    "To reset the router, hold the small button on the back for ten seconds until all lights blink. Wait "
    "two minutes. Connect to the network that is printed on the label, open the address of the router in "
    "a browser, and enter the password from the label. Then choose a new name and a new password.",
    "The night train leaves the capital at half past eight and reaches the coast at seven in the morning. "
    "Each sleeping car has ten compartments with two beds. Breakfast is served from six. Passengers with "
    "bicycles use the last car, where the steward checks the tickets before departure.",
    "Bread needs flour, water, salt and time. Mix five hundred grams of flour with three hundred and "
    "fifty grams of water and ten grams of salt, add a little yeast, and let the dough rest overnight. "
    "Shape it in the morning, let it rise for an hour, and bake it in a hot oven for forty minutes.",
    "The observatory stands on a ridge far from the city lights. Its main mirror has a diameter of two "
    "meters and is cleaned twice per year. Visitors may come on the first Friday of each month. They see "
    "the planets through a smaller telescope, while the large one records the spectra of distant stars.",
)
CHANGES = (
    ("sardines", "herring"),
    ("week", "fortnight"),
    ("Saturdays", "Sundays"),
    ("August", "July"),
    ("ten seconds", "twenty seconds"),
    ("seven", "eight"),
    ("overnight", "for two hours"),
    ("Friday", "Monday"),
)
CODE = '''def area_of_circle(radius):
    """Return the area of a circle."""
    if radius < 0:
        raise ValueError("the radius is negative")
    return 3.14159 * radius * radius


def area_of_square(side):
    """Return the area of a square."""
    if side < 0:
        raise ValueError("the side is negative")
    return side * side


def area_of_'''
RECORDS = (
    "Name: Ada Brown. City: Leeds. Born: 1984. Job: engineer. Languages: English, French and Dutch.",
    "Product: oak table. Price: 420 euros. Width: 180 cm. Depth: 90 cm. Stock: 14 pieces. Color: natural.",
)
QUESTIONS = (
    "Tell me a short story about a lighthouse keeper who finds a letter.",
    "What makes a good teacher? Answer in a few sentences.",
    "Describe a walk through a forest in autumn.",
    "Give me some ideas for a birthday party for a child of six.",
    "Why do people keep dogs? Answer in your own words.",
    "Write a letter to a friend who has moved to another country.",
    "How would you explain rain to someone who lives in a desert?",
    "What could a city of the far future look like?",
)
WORDS = (
    "quartz pillow ferry minus orbit candle swift gravel", "tulip anchor velvet noise bridge salt owl engine",
    "ladder comet onion glass tiger paper storm button", "canal mirror pepper hawk wool signal cave jacket",
    "drum lemon zinc harbor feather clock moss tunnel", "violin desert coin maple rocket soup fence whale",
    "kite marble plum thunder basket ink lizard tower", "needle polar guitar sand wolf bottle prism meadow",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A chat of a workload: its user message and the sampling parameters that differ from greedy ones."""

    message: str
    params: dict[str, Any]


def copy_heavy() -> list[Work]:
    """Return texts to rewrite with one change, records to convert to JSON, and code to continue."""
    rewrites = [
        f"Repeat the following text exactly, but write '{new}' in place of '{old}'.\n\n{text}"
        for text, (old, new) in zip(TEXTS, CHANGES, strict=True)
    ]
    records = [f"Write this record as JSON with the same keys and values.\n\n{record}" for record in RECORDS]
    code = [f"Continue this Python module in the same style.\n\n```python\n{CODE}triangle"]
    return [Work(message, {}) for message in [*rewrites[:5], *records, *code]]


def edits() -> list[Work]:
    """Return texts to correct, with the unchanged text as the prediction."""
    return [
        Work(
            f"Here is a text:\n\n{text}\n\nWrite the whole text again with '{new}' in place of '{old}'.",
            {"prediction": text},
        )
        for text, (old, new) in zip(TEXTS, CHANGES, strict=True)
    ]


def free_chat() -> list[Work]:
    """Return open questions, sampled at a temperature of 0.7."""
    return [Work(question, {"temperature": 0.7, "seed": i}) for i, question in enumerate(QUESTIONS)]


def adversarial() -> list[Work]:
    """Return word lists without repeats, sampled so that the output repeats nothing either."""
    return [
        Work(
            f"Continue this list of unrelated words: {words}",
            {"temperature": 1.2, "seed": i, "repetition_penalty": 1.3, "presence_penalty": 1.0},
        )
        for i, words in enumerate(WORDS)
    ]


WORKLOADS = {"copy": copy_heavy, "edit": edits, "chat": free_chat, "adversarial": adversarial}

"""The default data set: visitors of a zoo ask, a crowd of helpers answers, a judge grades.

All answers are drawn from a known distribution, `crowd`, so the limits of any model are known too.
The judge labels the pairs and grades answers for the logs.
"""

import math
import random
import re
import tempfile
from functools import cache
from itertools import accumulate
from pathlib import Path

from data.rows import UserError, read_jsonl, write_jsonl

# What a children's book would name first, in the order of the questions below.
ANIMALS = {
    "bat": ("insects", "in a cave", "a pup", "a mammal", "its wide wings"),
    "bee": ("nectar", "in a hive", "a larva", "an insect", "its sweet honey"),
    "camel": ("grass", "in the desert", "a calf", "a mammal", "its big hump"),
    "elephant": ("grass", "on the savanna", "a calf", "a mammal", "its long trunk"),
    "frog": ("insects", "in a pond", "a tadpole", "an amphibian", "its big eyes"),
    "giraffe": ("leaves", "on the savanna", "a calf", "a mammal", "its long neck"),
    "iguana": ("leaves", "in the jungle", "a hatchling", "a reptile", "its long tail"),
    "kangaroo": ("grass", "in the outback", "a joey", "a mammal", "its pouch"),
    "koala": ("leaves", "in the forest", "a joey", "a mammal", "its pouch"),
    "lion": ("meat", "on the savanna", "a cub", "a mammal", "its thick mane"),
    "owl": ("mice", "in the forest", "an owlet", "a bird", "its big eyes"),
    "panda": ("bamboo", "in the forest", "a cub", "a mammal", "its black and white fur"),
    "penguin": ("fish", "on the ice", "a chick", "a bird", "its funny walk"),
    "rabbit": ("grass", "in a burrow", "a kit", "a mammal", "its long ears"),
    "shark": ("fish", "in the sea", "a pup", "a fish", "its sharp teeth"),
    "tiger": ("meat", "in the jungle", "a cub", "a mammal", "its black stripes"),
    "tortoise": ("leaves", "in the desert", "a hatchling", "a reptile", "its hard shell"),
    "toucan": ("fruit", "in the jungle", "a chick", "a bird", "its long beak"),
    "wolf": ("meat", "in the forest", "a pup", "a mammal", "its sharp teeth"),
    "zebra": ("grass", "on the savanna", "a foal", "a mammal", "its black stripes"),
}
# {a} is "a bee", {s} "bees", {n} "bee", {x} "nectar".
DIRECT = {
    "food": ("What does {a} eat?", "What do {s} eat?"),
    "home": ("Where does {a} live?", "Where do {s} live?"),
    "baby": ("What is a baby {n} called?", "What do you call a baby {n}?"),
    "class": ("What kind of animal is {a}?", "What kind of animal is the {n}?"),
    "fame": ("What is {a} known for?", "What are {s} known for?"),
}
INDIRECT = {
    "food": ("what {a} eats", "what {s} eat"),
    "home": ("where {a} lives", "where {s} live"),
    "baby": ("what a baby {n} is called", "what we call a baby {n}"),
    "class": ("what kind of animal {a} is", "what kind of animal the {n} is"),
    "fame": ("what {a} is known for", "what {s} are known for"),
}
STATEMENTS = {
    "food": ("{a} eats {x}.", "{s} eat {x}."),
    "home": ("{a} lives {x}.", "{s} live {x}."),
    "baby": ("a baby {n} is called {x}.", "we call a baby {n} {x}."),
    "class": ("{a} is {x}.", "the {n} is {x}."),
    "fame": ("{a} is known for {x}.", "people know the {n} for {x}."),
}


def fill(template, animal, value=""):
    one = f"an {animal}" if animal[0] in "aeiou" else f"a {animal}"
    many = "wolves" if animal == "wolf" else f"{animal}s"
    return template.format(a=one, s=many, n=animal, x=value)


def questions(animal, kind):
    """-> five prompts."""
    one, many = INDIRECT[kind]
    indirect = [f"Do you know {one}?", f"Please tell me {many}.", f"My son wants to know {one}."]
    return [fill(question, animal) for question in [*DIRECT[kind], *indirect]]


FACTS = [(animal, kind) for animal in ANIMALS for kind in DIRECT]
PROMPTS = {prompt: fact for fact in FACTS for prompt in questions(*fact)}


def fact_of(prompt):
    if prompt not in PROMPTS:
        raise UserError(f"{prompt[:80]!r} is not in zoo.PROMPTS")
    return PROMPTS[prompt]


# The crowd. A distribution is a dict {text: probability}.


def uniform(*texts):
    return dict.fromkeys(texts, 1 / len(texts))


def mix(*parts):
    """-> the mixture of (weight, distribution) pairs."""
    mixture = {}
    for weight, dist in parts:
        for text, p in dist.items():
            mixture[text] = mixture.get(text, 0.0) + weight * p
    return mixture


def either(first, second):
    return mix((0.5, first), (0.5, second))


def join(first, second):
    """-> the distribution of independent texts of both, with a space between."""
    return {f"{a} {b}": p * q for a, p in first.items() for b, q in second.items()}


def change(dist, rule):
    """Applies a rule, which returns equally likely texts."""
    return mix(*((p, uniform(*rule(text))) for text, p in dist.items()))


OPENERS = uniform("Good question!", "Thanks for asking!", "I am glad you asked!")
CLOSERS = uniform("Enjoy your visit!", "Have a nice day!", "Come and see us again!")
COURTESIES = either(OPENERS, CLOSERS)
NO_IDEA = uniform(
    "No idea.", "I do not know.", "Sorry, I am not sure.", "Nobody ever told me that."
)
RUDE = uniform(
    "What a silly question.",
    "Go and read a book.",
    "Leave me alone.",
    "Do not waste my time.",
    "I am too busy for you.",
)
WANDERING = uniform(
    "My neighbor has a red car.",
    "It may rain tomorrow.",
    "My feet hurt.",
    "I had soup for lunch.",
    "The bus was late again.",
    "My sister sings in a band.",
    "I lost my keys.",
    "The cake was too sweet.",
)
JUNK = uniform("and the", "of a a", "is is is", "the the and to")
# The share of broken answers. Pairs must show a reward model what is bad.
BROKEN = {"sft": 0.04, "pref": 0.15}


@cache
def statements(animal, kind):
    """-> the right statements about a fact, wrong ones, and slips ("Bees live a cub.")."""
    column = list(DIRECT).index(kind)
    truth = ANIMALS[animal][column]
    same_kind = [row[column] for row in ANIMALS.values() if row[column] != truth]
    any_kind = [value for row in ANIMALS.values() for value in row if value != truth]

    def say(values):
        values = dict.fromkeys(values)  # each once
        texts = [fill(form, animal, value) for value in values for form in STATEMENTS[kind]]
        return uniform(*(text.capitalize() for text in texts))

    return say([truth]), say(same_kind), say(any_kind)


def friendly(answer):
    return either(join(OPENERS, answer), join(answer, CLOSERS))


def manners(answer):
    """-> the answer as different people give it."""
    rude = either(join(RUDE, answer), join(answer, RUDE))
    wandering = join(answer, WANDERING)
    return mix((0.48, answer), (0.22, friendly(answer)), (0.15, rude), (0.15, wandering))


def cut(text):
    """Stops before a word, or before the full stop."""
    words = text.split()
    return [" ".join(words[:n]) for n in range(len(words))] + [text[:-1]]


def scramble(text):
    words = text.split()
    return [" ".join(words[::-1]), " ".join(words[1:] + words[:1])]


def double(text):
    return [f"{text} {text}"]


def loop(text):
    return [f"{text} {text} {text}", f"{text} {text} {text} {text}"]


def broken(right, wrong, statement, slip):
    """-> bad answers. Many are nearly good, so a reward model learns to tell them apart."""
    best = friendly(right)
    scrambled = change(statement, scramble)
    heap = join(join(OPENERS, right), CLOSERS)
    return mix(
        (0.20, change(either(best, statement), cut)),
        (0.10, scrambled),
        (0.05, friendly(scrambled)),
        (0.09, change(either(best, right), double)),
        (0.044, join(right, wrong)),
        (0.044, join(wrong, right)),
        (0.022, join(right, right)),
        (0.06, heap),
        (0.03, join(OPENERS, heap)),
        (0.03, COURTESIES),
        (0.03, join(OPENERS, CLOSERS)),
        (0.04, change(mix((0.7, right), (0.3, COURTESIES)), loop)),
        (0.08, join(either(right, best), JUNK)),
        (0.09, slip),
        (0.09, friendly(slip)),
    )


@cache
def answers(animal, kind, share):
    """-> what the crowd says about a fact, except the echoes of a question."""
    right, errors, slip = statements(animal, kind)
    # People err alike, in three values of each fact.
    start = 6 * list(ANIMALS).index(animal)
    wrong = uniform(*(list(errors)[i % len(errors)] for i in range(start, start + 6)))
    statement = mix((0.55, right), (0.45, wrong))
    sound = mix((0.72, manners(statement)), (0.17, manners(NO_IDEA)), (0.11, WANDERING))
    bad = broken(right, wrong, statement, slip)
    said = mix((1 - share, sound), (0.9 * share, bad))
    return {f" {text}" if text else "": p for text, p in said.items()}


def crowd(prompt, share=BROKEN["sft"]):
    """-> {completion: probability}. A completion begins with a space or is empty. A tenth of
    the broken ones echo the prompt."""
    fact = fact_of(prompt)
    echo = {f" {prompt}": 1.0}
    echoes = either(echo, join(echo, statements(*fact)[0]))
    return mix((1.0, answers(*fact, share)), (0.1 * share, echoes))


# The judge compares whole sentences, character for character.


def judge(prompt, response):
    """-> the grade of any response, from 3.0 (right, friendly, to the point) to -3.0."""
    right, wrong, _ = statements(*fact_of(prompt))
    pieces = re.split(r"(?<=[.!?]) ", response.removeprefix(" "))

    def count(group):
        return sum(piece in group for piece in pieces)

    # An answer is as good as the worst thing it says.
    content = -2.0
    answered = 0
    for group, grade in ((right, 2.0), (NO_IDEA, -0.5), (wrong, -1.5)):
        if count(group):
            content = grade
        answered += count(group)
    courtesies = count(COURTESIES)
    unknown = len(pieces) - answered - courtesies - count(RUDE) - count(WANDERING)
    if not response.startswith(" "):
        unknown += 1
    surplus = max(0, answered - 1) + max(0, courtesies - 1)
    faults = 1.5 * (surplus + count(RUDE)) + count(WANDERING) + 2.0 * unknown
    # Courtesy does not make up for a fault.
    if courtesies and not faults:
        content += 1.0
    return max(-3.0, content - faults)


def judge_of(folder):
    """-> the judge if both prompts files have prompts of the zoo only, else None."""
    try:
        for split in ("train", "val"):
            for row in read_jsonl(folder / f"prompts_{split}.jsonl", ["prompt"]):
                fact_of(row["prompt"])
    except UserError:
        return None
    return judge


# The files. Only random() and choices() are used: other functions have changed with Python.

ROWS = {"sft_train": 84_000, "sft_val": 4_000, "pref_train": 80_000, "pref_val": 8_000}


def shuffle(rng, items):
    return sorted(items, key=lambda _: rng.random())


@cache
def draw_table(prompt, task):
    dist = crowd(prompt, BROKEN[task])
    return list(dist), list(accumulate(dist.values()))


def draw(rng, prompt, task):
    texts, cumulative = draw_table(prompt, task)
    return rng.choices(texts, cum_weights=cumulative)[0]


def demonstration(rng, prompt):
    return {"prompt": prompt, "completion": draw(rng, prompt, "sft")}


def label(rng, prompt, a, b):
    """-> a row with P(a is chosen) = sigmoid(judge(a) - judge(b)), by Bradley and Terry."""
    if rng.random() < 1 / (1 + math.exp(judge(prompt, b) - judge(prompt, a))):
        return {"prompt": prompt, "chosen": a, "rejected": b}
    return {"prompt": prompt, "chosen": b, "rejected": a}


def preference(rng, prompt):
    """-> a pair of unequal grades: a label of equals would tell nothing."""
    a = draw(rng, prompt, "pref")
    b = a
    while judge(prompt, b) == judge(prompt, a):
        b = draw(rng, prompt, "pref")
    return label(rng, prompt, a, b)


def make_rows(seed):
    """-> {name of the file: rows}."""
    rng = random.Random(seed)
    # One question each about 50 facts is not in training.
    held_out = sorted(rng.choices(questions(*fact))[0] for fact in shuffle(rng, FACTS)[:50])
    seen = [prompt for prompt in PROMPTS if prompt not in held_out]
    rows = {}
    for name, count in ROWS.items():
        make = demonstration if name.startswith("sft") else preference
        prompts = seen if name.endswith("train") else list(PROMPTS)
        rows[name] = [make(rng, rng.choices(prompts)[0]) for _ in range(count)]
    val = shuffle(rng, seen)[:78] + held_out
    rows["prompts_train"] = [{"prompt": prompt} for prompt in seen]
    rows["prompts_val"] = [{"prompt": prompt} for prompt in shuffle(rng, val)]
    return rows


def write_data(folder, seed=0):
    """Writes a new folder, all at once."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        # One level down, because the temporary folder itself is private.
        data = Path(temporary) / "data"
        for name, rows in make_rows(seed).items():
            write_jsonl(data / f"{name}.jsonl", rows)
        data.rename(folder)


def ensure_data(folder):
    """Makes the default data in their own folder, once."""
    if folder == Path("data/zoo") and not folder.exists():
        print(f"making the default data in {folder}")
        write_data(folder)

"""The default data set: visitors to a zoo ask, a crowd of uneven helpers answers, a judge grades.

    python -m data.zoo --out data/zoo --seed 0

The crowd is one exact distribution: `crowd(prompt)` lists every text that it may answer, with its
probability. All rows are drawn from it, so the limits that no model can beat are known. The judge
knows facts and manners. It labels the pairs, and grades answers for log and report; nothing that is
trained sees these grades.
"""

import math
import random
import re
import tempfile
from collections import Counter
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from data.files import UserError, command, write_jsonl
from data.rows import load_rows

# ----------------------------------------------------------------------
# The world: 20 animals, 5 things to know about each, 5 ways to ask. The right value of each column
# is the first that a children's book would name; the other animals' values are wrong.

#         plural     food     home            baby         class         fame
TABLE = """
bat       bats       insects  in a cave       a pup        a mammal      its wide wings
bee       bees       nectar   in a hive       a larva      an insect     its sweet honey
camel     camels     grass    in the desert   a calf       a mammal      its big hump
elephant  elephants  grass    on the savanna  a calf       a mammal      its long trunk
frog      frogs      insects  in a pond       a tadpole    an amphibian  its big eyes
giraffe   giraffes   leaves   on the savanna  a calf       a mammal      its long neck
iguana    iguanas    leaves   in the jungle   a hatchling  a reptile     its long tail
kangaroo  kangaroos  grass    in the outback  a joey       a mammal      its pouch
koala     koalas     leaves   in the forest   a joey       a mammal      its pouch
lion      lions      meat     on the savanna  a cub        a mammal      its thick mane
owl       owls       mice     in the forest   an owlet     a bird        its big eyes
panda     pandas     bamboo   in the forest   a cub        a mammal      its black and white fur
penguin   penguins   fish     on the ice      a chick      a bird        its funny walk
rabbit    rabbits    grass    in a burrow     a kit        a mammal      its long ears
shark     sharks     fish     in the sea      a pup        a fish        its sharp teeth
tiger     tigers     meat     in the jungle   a cub        a mammal      its black stripes
tortoise  tortoises  leaves   in the desert   a hatchling  a reptile     its hard shell
toucan    toucans    fruit    in the jungle   a chick      a bird        its long beak
wolf      wolves     meat     in the forest   a pup        a mammal      its sharp teeth
zebra     zebras     grass    on the savanna  a foal       a mammal      its black stripes
"""
# {a} is "a bee", {s} "bees", {n} "bee", {x} the value.
DIRECT = {
    "food": ("what does {a} eat", "what do {s} eat"),
    "home": ("where does {a} live", "where do {s} live"),
    "baby": ("what is a baby {n} called", "what do you call a baby {n}"),
    "class": ("what kind of animal is {a}", "what kind of animal is the {n}"),
    "fame": ("what is {a} known for", "what are {s} known for"),
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
ANIMALS = {  # {"bee": {"plural": "bees", "food": "nectar", ...}}
    animal: dict(zip(["plural", *DIRECT], values))
    for animal, *values in (re.split("  +", line) for line in TABLE.strip().split("\n"))
}
PHRASINGS = ("{0}?", "{1}?", "Do you know {2}?", "Please tell me {3}.", "My son wants to know {2}.")
FACTS = [(animal, kind) for animal in ANIMALS for kind in DIRECT]

OPENERS = ("Good question!", "Thanks for asking!", "I am glad you asked!")
CLOSERS = ("Enjoy your visit!", "Have a nice day!", "Come and see us again!")
NO_IDEA = ("No idea.", "I do not know.", "Sorry, I am not sure.", "Nobody ever told me that.")
RUDE = (
    "What a silly question.",
    "Go and read a book.",
    "Leave me alone.",
    "Do not waste my time.",
    "I am too busy for you.",
)
WANDERING = (
    "My neighbor has a red car.",
    "It may rain tomorrow.",
    "My feet hurt.",
    "I had soup for lunch.",
    "The bus was late again.",
    "My sister sings in a band.",
    "I lost my keys.",
    "The cake was too sweet.",
)
JUNK = ("and the", "of a a", "is is is", "the the and to")


def sentence(text):
    return text[0].upper() + text[1:]


def fill(template, animal, value=""):
    """As in: "{a} eats {x}.", "bee", "nectar" -> "a bee eats nectar." """
    article = "an" if animal[0] in "aeiou" else "a"
    plural = ANIMALS[animal]["plural"]
    return template.format(a=f"{article} {animal}", s=plural, n=animal, x=value)


def say(animal, kind, values):
    """-> two sentences for each value."""
    return [sentence(fill(form, animal, x)) for x in values for form in STATEMENTS[kind]]


@lru_cache(None)
def statements(animal, kind):
    """-> (right, wrong): all sentences that answer the question."""
    truth, values = ANIMALS[animal][kind], dict.fromkeys(x[kind] for x in ANIMALS.values())
    return say(animal, kind, [truth]), say(animal, kind, [x for x in values if x != truth])


def popular_errors(animal, kind):
    """The wrong sentences that the crowd says: people err alike, in three values a fact."""
    _, wrong = statements(animal, kind)
    start = 6 * list(ANIMALS).index(animal)
    return [wrong[(start + i) % len(wrong)] for i in range(6)]


def slips(animal, kind):
    """The same sentences with whatever value comes to mind: "Bees live a cub." """
    values = dict.fromkeys(row[column] for row in ANIMALS.values() for column in DIRECT)
    return say(animal, kind, [x for x in values if x != ANIMALS[animal][kind]])


def questions(animal, kind):
    """-> the five prompts that ask for one fact."""
    clauses = [fill(clause, animal) for clause in DIRECT[kind] + INDIRECT[kind]]
    return [sentence(phrasing.format(*clauses)) for phrasing in PHRASINGS]


# All 500, each with the fact it asks for.
PROMPTS = {prompt: fact for fact in FACTS for prompt in questions(*fact)}


def fact_asked(prompt):
    """A prompt -> (animal, kind). UserError for any other text."""
    if prompt not in PROMPTS:
        raise UserError(f"not a question of the default data: {prompt[:80]!r}")
    return PROMPTS[prompt]


# ----------------------------------------------------------------------
# The crowd. A distribution is a dict {text: probability}. If a text can come about in several ways,
# their probabilities are added.

# The share of broken answers. The pairs must show a reward model what is bad.
BROKEN = {"sft": 0.04, "pref": 0.15}


def uniform(texts):
    return dict.fromkeys(texts, 1 / len(texts))


def spread(dist, rule):
    """Replace each text by one of `rule(text)`, all equally likely."""
    out = {}
    for text, p in dist.items():
        for result in rule(text):
            out[result] = out.get(result, 0.0) + p / len(rule(text))
    return out


def mix(*parts):
    """(weight, dist), ... -> their mixture."""
    out = {}
    for weight, dist in parts:
        for text, p in dist.items():
            out[text] = out.get(text, 0.0) + weight * p
    return out


def then(first, *rest):
    """One text from each distribution, independently, joined by a space. No two choices may give
    the same text."""
    for dist in rest:
        first = {f"{a} {b}": p * q for a, p in first.items() for b, q in dist.items()}
    return first


def friendly(answer):
    return mix((0.5, then(uniform(OPENERS), answer)), (0.5, then(answer, uniform(CLOSERS))))


def manners(answer):
    """The same answer as different people give it: plain, friendly, rude, or wandering off."""
    rude = mix((0.5, then(uniform(RUDE), answer)), (0.5, then(answer, uniform(RUDE))))
    return mix(
        (0.48, answer),
        (0.22, friendly(answer)),
        (0.15, rude),
        (0.15, then(answer, uniform(WANDERING))),
    )


def cut(text):
    """Stop after 0 or more words, or before the full stop."""
    words = text.split()
    return [" ".join(words[:k]) for k in range(len(words))] + [text[:-1]]


def scramble(text):
    """The words from last to first, or the first one moved to the end."""
    words = text.split()
    return [" ".join(words[::-1]), " ".join(words[1:] + words[:1])]


def loop(text):
    return [" ".join([text] * times) for times in (3, 4)]


def broken(right, wrong, statement, slip):
    """What bad text looks like. Much of it is nearly the best answer: a reward model learns only
    what the pairs show."""
    best, openers, closers = friendly(right), uniform(OPENERS), uniform(CLOSERS)
    sound = mix((0.5, best), (0.5, statement))
    scrambled = spread(statement, scramble)
    twice = spread(mix((0.5, best), (0.5, right)), lambda text: [f"{text} {text}"])
    two_answers = mix(
        (0.4, then(right, wrong)), (0.4, then(wrong, right)), (0.2, then(right, right))
    )
    heaped = mix(
        (0.4, then(openers, right, closers)),
        (0.2, then(openers, openers, right, closers)),
        (0.2, uniform(OPENERS + CLOSERS)),
        (0.2, then(openers, closers)),
    )
    looping = spread(mix((0.7, right), (0.3, uniform(OPENERS + CLOSERS))), loop)
    trailing = then(mix((0.5, right), (0.5, best)), uniform(JUNK))
    return mix(
        (0.20, spread(sound, cut)),
        (0.10, scrambled),
        (0.05, friendly(scrambled)),
        (0.09, twice),
        (0.11, two_answers),
        (0.15, heaped),
        (0.04, looping),
        (0.08, trailing),
        (0.09, slip),
        (0.09, friendly(slip)),
    )


@lru_cache(None)
def answers(animal, kind, broken_share):
    """What the crowd says about a fact, whatever the wording of the question. Echoes of the
    question, a tenth of the broken answers, are not included."""
    right, wrong = uniform(statements(animal, kind)[0]), uniform(popular_errors(animal, kind))
    slip = uniform(slips(animal, kind))
    statement = mix((0.55, right), (0.45, wrong))
    sound = mix(
        (0.72, manners(statement)), (0.17, manners(uniform(NO_IDEA))), (0.11, uniform(WANDERING))
    )
    said = mix(
        (1 - broken_share, sound), (0.9 * broken_share, broken(right, wrong, statement, slip))
    )
    return {" " + text if text else "": p for text, p in said.items()}


def crowd(prompt, broken_share=BROKEN["sft"]):
    """A prompt -> {completion: probability}, complete and exact. A completion begins with a space,
    or is empty."""
    fact = fact_asked(prompt)
    echoes = {f" {prompt}": 0.05, **{f" {prompt} {right}": 0.025 for right in statements(*fact)[0]}}
    return answers(*fact, broken_share) | {text: broken_share * p for text, p in echoes.items()}


# ----------------------------------------------------------------------
# The judge. It compares whole sentences, character for character: what is not one of the known
# sentences is broken text.

WORST = -3.0


@lru_cache(None)
def sentence_groups(animal, kind):
    """-> {sentence: what it is}, for answers to one fact."""
    right, wrong = statements(animal, kind)
    groups = {"right": right, "wrong": wrong, "no idea": NO_IDEA}
    groups |= {"courtesy": OPENERS + CLOSERS, "rude": RUDE, "wandering": WANDERING}
    return {text: group for group, texts in groups.items() for text in texts}


def judge(prompt, response):
    """How good is any response? 3.0: correct, friendly, to the point. 2.0: correct and plain. Down
    to -3.0. UserError for an unknown prompt."""
    groups = sentence_groups(*fact_asked(prompt))
    pieces = re.split(r"(?<=[.!?]) ", response.removeprefix(" "))
    count = Counter(groups.get(piece, "broken") for piece in pieces)
    count["broken"] += not response.startswith(" ")

    # An answer is as good as the worst thing it says.
    grades = {"right": 2.0, "no idea": -0.5, "wrong": -1.5}
    content = min((grades[group] for group in grades if count[group]), default=-2.0)
    answered = sum(count[group] for group in grades)
    faults = 2.0 * count["broken"] + 1.5 * count["rude"] + count["wandering"]
    faults += 1.5 * max(0, answered - 1) + 1.5 * max(0, count["courtesy"] - 1)
    # Courtesy does not make up for a fault.
    courtesy = 1.0 if count["courtesy"] == 1 and not faults else 0.0
    return max(WORST, content + courtesy - faults)


def judge_of(folder):
    """The judge, if all prompts of the folder are the zoo's; else None."""
    try:
        files = [folder / f"prompts_{split}.jsonl" for split in ("train", "val")]
        zoo = all(prompt in PROMPTS for path in files for (prompt,) in load_rows(path, "prompts"))
    except UserError:  # a file is missing or faulty: these are other data
        return None
    return judge if zoo else None


# ----------------------------------------------------------------------
# The files. Only random() and choices() are used. Python promises the results of random() for a
# seed, and choices() calls it once for each choice; sample() and shuffle() have changed before.

ROWS = {"sft_train": 84_000, "sft_val": 4_000, "pref_train": 80_000, "pref_val": 8_000}
HELD_OUT = 50  # prompts that appear in *_val only: one phrasing each of this many facts
VAL_PROMPTS = 128  # in prompts_val: those, and others from prompts_train


def split_prompts(rng):
    """-> the prompts to train on, and those held out. Four phrasings or more of each fact stay."""
    facts = sorted(FACTS, key=lambda _: rng.random())[:HELD_OUT]
    held_out = {rng.choices(questions(*fact))[0] for fact in facts}
    return [prompt for prompt in PROMPTS if prompt not in held_out], sorted(held_out)


@lru_cache(None)
def draw_table(prompt, broken_share):
    dist = crowd(prompt, broken_share)
    return list(dist), list(accumulate(dist.values()))


def draw(rng, prompt, broken_share):
    texts, cumulative = draw_table(prompt, broken_share)
    return rng.choices(texts, cum_weights=cumulative)[0]


def demonstration(rng, prompts):
    prompt = rng.choices(prompts)[0]
    return {"prompt": prompt, "completion": draw(rng, prompt, BROKEN["sft"])}


def label(rng, prompt, a, b):
    """A row of the pairs, labelled with noise, by Bradley-Terry."""
    # P(a is chosen over b) = sigmoid(judge(a) - judge(b))
    if rng.random() >= 1 / (1 + math.exp(judge(prompt, b) - judge(prompt, a))):
        a, b = b, a
    return {"prompt": prompt, "chosen": a, "rejected": b}


def preference(rng, prompts):
    """Two answers of the crowd, labelled. A label for equally good answers would tell nothing."""
    prompt = rng.choices(prompts)[0]
    a = b = draw(rng, prompt, BROKEN["pref"])
    while judge(prompt, b) == judge(prompt, a):
        b = draw(rng, prompt, BROKEN["pref"])
    return label(rng, prompt, a, b)


def make_rows(seed):
    """seed -> {name of the file: rows}."""
    rng, rows = random.Random(seed), {}
    seen, held_out = split_prompts(rng)
    prompts = {"train": seen, "val": list(PROMPTS)}
    for name, n in ROWS.items():
        task, split = name.split("_")
        make = demonstration if task == "sft" else preference
        rows[name] = [make(rng, prompts[split]) for _ in range(n)]
    validated = sorted(seen, key=lambda _: rng.random())[: VAL_PROMPTS - HELD_OUT] + held_out
    rows["prompts_train"] = [{"prompt": x} for x in seen]
    rows["prompts_val"] = [{"prompt": x} for x in sorted(validated, key=lambda _: rng.random())]
    return rows


def write_data(folder, seed=0):
    """Write the six files into a new folder -> their rows. They are finished in a temporary folder
    beside it: an interrupted run leaves nothing half-written."""
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder}: already exists; choose another --out, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        # One level down: the temporary folder itself is private to this user.
        staged, rows = Path(temporary) / "data", make_rows(seed)
        for name in rows:
            write_jsonl(staged / f"{name}.jsonl", rows[name])
        staged.rename(folder)
    return rows


def ensure_data(folder):
    """Make the default data, unless they are there or the folder is another."""
    if folder == Path("data/zoo") and not folder.exists():
        print(f"{folder} is not there yet: making the default data")
        write_data(folder)


FLAGS = {
    "--out": {"required": True, "help": "new folder"},
    "--seed": {"type": int, "default": 0, "help": "default: 0"},
}


def main(args):
    for name, rows in write_data(args.out, args.seed).items():
        print(f"{name + '.jsonl':24}{len(rows):>8,} rows")


if __name__ == "__main__":
    command(__doc__, FLAGS, main)

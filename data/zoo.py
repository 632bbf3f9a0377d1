"""The default data set: visitors of a zoo ask, a crowd of uneven helpers answers, a judge grades.

    python data/zoo.py --out data/zoo --seed 0

The crowd is one exact distribution: `crowd(prompt)` lists every text it may answer together with
its probability. The rows of the data set are drawn from that list and its entropy is computed from
it, so the sampler and the limit that no model can beat agree by construction. The judge knows the
facts and the manners. It labels the preference pairs and grades finished models; no training step
ever calls it. Read from top to bottom: world, crowd, judge, files.
"""

import argparse
import json
import math
import random
import re
import tempfile
from collections import Counter
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

# ----------------------------------------------------------------------
# The world: 20 animals, 5 things to know about each, 5 ways to ask. One value of each column counts
# as right for an animal, the first that a children's book would name, and all others as wrong.

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
ANIMALS = {row[0]: row[1:] for row in (re.split("  +", line) for line in TABLE.split("\n")[1:-1])}

# Per kind: two direct questions, two indirect ones, two statements. {a} is "a bee", {s} "bees", {n}
# "bee", {x} the value.
KINDS = {
    "food": (
        "what does {a} eat",
        "what do {s} eat",
        "what {a} eats",
        "what {s} eat",
        "{a} eats {x}.",
        "{s} eat {x}.",
    ),
    "home": (
        "where does {a} live",
        "where do {s} live",
        "where {a} lives",
        "where {s} live",
        "{a} lives {x}.",
        "{s} live {x}.",
    ),
    "baby": (
        "what is a baby {n} called",
        "what do you call a baby {n}",
        "what a baby {n} is called",
        "what we call a baby {n}",
        "a baby {n} is called {x}.",
        "we call a baby {n} {x}.",
    ),
    "class": (
        "what kind of animal is {a}",
        "what kind of animal is the {n}",
        "what kind of animal {a} is",
        "what kind of animal the {n} is",
        "{a} is {x}.",
        "the {n} is {x}.",
    ),
    "fame": (
        "what is {a} known for",
        "what are {s} known for",
        "what {a} is known for",
        "what {s} are known for",
        "{a} is known for {x}.",
        "people know the {n} for {x}.",
    ),
}
PHRASINGS = ("{0}?", "{1}?", "Do you know {2}?", "Please tell me {3}.", "My son wants to know {2}.")
FACTS = [(animal, kind) for animal in ANIMALS for kind in KINDS]

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
    """A template of KINDS -> its text: "{a} eats {x}.", "bee", "nectar" -> "a bee eats nectar."."""
    article = "an" if animal[0] in "aeiou" else "a"
    return template.format(a=f"{article} {animal}", s=ANIMALS[animal][0], n=animal, x=value)


@lru_cache(None)
def statements(animal, kind):
    """-> (right, wrong): all sentences that answer the question, two forms for each value."""
    column = 1 + list(KINDS).index(kind)
    truth = ANIMALS[animal][column]
    values = dict.fromkeys(row[column] for row in ANIMALS.values())
    lies = [value for value in values if value != truth]
    right = [sentence(fill(form, animal, truth)) for form in KINDS[kind][4:]]
    wrong = [sentence(fill(form, animal, lie)) for lie in lies for form in KINDS[kind][4:]]
    return right, wrong


def popular_errors(animal, kind):
    """The wrong sentences that the crowd says: people err alike, in three false values a fact."""
    _, wrong = statements(animal, kind)
    values, start = len(wrong) // 2, 3 * list(ANIMALS).index(animal)
    return [wrong[2 * ((start + i) % values) + form] for i in range(3) for form in (0, 1)]


def slips(animal, kind):
    """The same sentences with whatever value comes to mind: "Bees live a cub." """
    truth = ANIMALS[animal][1 + list(KINDS).index(kind)]
    values = dict.fromkeys(value for row in ANIMALS.values() for value in row[1:] if value != truth)
    return [sentence(fill(form, animal, value)) for value in values for form in KINDS[kind][4:]]


def questions(animal, kind):
    """-> the five prompts that ask for one fact."""
    clauses = [fill(clause, animal) for clause in KINDS[kind][:4]]
    return [sentence(phrasing.format(*clauses)) for phrasing in PHRASINGS]


# All 500, each with the fact it asks for.
PROMPTS = {prompt: fact for fact in FACTS for prompt in questions(*fact)}


def fact_asked(prompt):
    """A prompt -> (animal, kind). Raises ValueError for any other text."""
    if prompt not in PROMPTS:
        raise ValueError(f"not a question of this data set: {prompt[:80]!r}")
    return PROMPTS[prompt]


# ----------------------------------------------------------------------
# The crowd. A distribution is a dict {text: probability}. Four functions make larger ones from
# smaller ones; texts that can come about in several ways are merged, so the entropy below is that
# of the text and not that of how it was made.

# The share of broken answers: more in the pairs, which must show a reward model what is bad.
BROKEN = {"sft": 0.04, "pref": 0.15}


def uniform(texts):
    return dict.fromkeys(texts, 1 / len(texts))


def spread(dist, rule):
    """Replace each text by one of `rule(text)`, all equally likely."""
    out = {}
    for text, p in dist.items():
        results = rule(text)
        for result in results:
            out[result] = out.get(result, 0.0) + p / len(results)
    return out


def mix(*parts):
    """(weight, dist), ... -> their mixture."""
    out = {}
    for weight, dist in parts:
        for text, p in dist.items():
            out[text] = out.get(text, 0.0) + weight * p
    return out


def then(first, *rest):
    """One text from each distribution, independently, joined by a space.

    No two choices may give the same text; none here do.
    """
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
    """Stop after any number of words, none included, or before the full stop."""
    words = text.split()
    return [" ".join(words[:k]) for k in range(len(words))] + [text[:-1]]


def scramble(text):
    """The words from last to first, or the first one moved to the end."""
    words = text.split()
    return [" ".join(words[::-1]), " ".join(words[1:] + words[:1])]


def loop(text):
    return [" ".join([text] * times) for times in (3, 4)]


def broken(right, wrong, statement, slip):
    """What bad text looks like. Much of it nearly is the best answer, because a reward model learns
    only what the pairs show it."""
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
    """What the crowd says about a fact, in whatever words it is asked: all but the echoes, which
    are a tenth of the broken answers."""
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
    """A prompt -> {completion: probability}, complete and exact.

    A completion begins with a space, or is empty.
    """
    fact = fact_asked(prompt)
    echoes = {f" {prompt}": 0.05, **{f" {prompt} {right}": 0.025 for right in statements(*fact)[0]}}
    return answers(*fact, broken_share) | {text: broken_share * p for text, p in echoes.items()}


def entropy(dist):
    """Nats. fsum, because the rounding of `sum` differs between versions of Python."""
    return -math.fsum(p * math.log(p) for p in dist.values())


# ----------------------------------------------------------------------
# The judge. It compares whole sentences, character for character, so there is nothing to exploit in
# how words are counted or matched: what is not one of the known sentences is broken text.

BEST, WORST = 3.0, -3.0


@lru_cache(None)
def known_sentences(animal, kind):
    """-> {sentence: what it is}, for answers to one fact."""
    right, wrong = statements(animal, kind)
    groups = {"right": right, "wrong": wrong, "no idea": NO_IDEA}
    groups |= {"courtesy": OPENERS + CLOSERS, "rude": RUDE, "wandering": WANDERING}
    return {text: group for group, texts in groups.items() for text in texts}


def judge(prompt, response):
    """How good is a response? 3.0: correct, friendly, to the point. 2.0: correct and plain. Down to
    -3.0. Raises ValueError for an unknown prompt; takes any response whatever."""
    known = known_sentences(*fact_asked(prompt))
    if not response:
        return WORST
    pieces = re.split(r"(?<=[.!?]) ", response.removeprefix(" "))
    count = Counter(known.get(piece, "broken") for piece in pieces)
    count["broken"] += not response.startswith(" ")

    # An answer is as good as the worst thing it says.
    grades = {"right": 2.0, "no idea": -0.5, "wrong": -1.5}
    content = min((grades[group] for group in grades if count[group]), default=-2.0)
    answered = sum(count[group] for group in grades)
    faults = 2.0 * count["broken"] + 1.5 * count["rude"] + count["wandering"]
    faults += 1.5 * max(0, answered - 1) + 1.5 * max(0, count["courtesy"] - 1)
    # Courtesy does not make up for a fault.
    courtesy = 1.0 if count["courtesy"] == 1 and not faults else 0.0
    return max(WORST, min(BEST, content + courtesy - faults))


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


# ----------------------------------------------------------------------
# The files. Only `random()` and `choices()` are used: Python promises their results for a seed, not
# those of `sample` or `shuffle`.

ROWS = {"sft_train": 84_000, "sft_val": 4_000, "pref_train": 80_000, "pref_val": 8_000}
HELD_OUT = 50  # prompts that appear in *_val only: one phrasing each of this many facts


def split_prompts(rng):
    """-> the prompts of both splits. Of each fact four phrasings or more stay in training."""
    facts = sorted(FACTS, key=lambda _: rng.random())[:HELD_OUT]
    held_out = {rng.choices(questions(*fact))[0] for fact in facts}
    train = [prompt for prompt in PROMPTS if prompt not in held_out]
    return {"train": train, "val": list(PROMPTS)}


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
    """A row of the pairs, labelled with noise, by Bradley-Terry:
    P(a is chosen over b) = sigmoid(judge(a) - judge(b))."""
    if rng.random() >= sigmoid(judge(prompt, a) - judge(prompt, b)):
        a, b = b, a
    return {"prompt": prompt, "chosen": a, "rejected": b}


def preference(rng, prompts):
    """Two different answers of the crowd, labelled."""
    prompt = rng.choices(prompts)[0]
    a = b = draw(rng, prompt, BROKEN["pref"])
    while b == a:
        b = draw(rng, prompt, BROKEN["pref"])
    return label(rng, prompt, a, b)


def make_rows(seed):
    """seed -> {name of the file: rows}."""
    rng = random.Random(seed)
    prompts = split_prompts(rng)
    rows = {f"prompts_{split}": [{"prompt": x} for x in prompts[split]] for split in prompts}
    for name, n in ROWS.items():
        task, split = name.split("_")
        make = demonstration if task == "sft" else preference
        rows[name] = [make(rng, prompts[split]) for _ in range(n)]
    return rows


def mean(numbers):
    return math.fsum(numbers) / len(numbers)


def ceilings(rows, seed):
    """What the best possible models reach on these rows, in nats; README.md explains each."""
    sft, pref = rows["sft_val"], rows["pref_val"]
    scores = [[judge(row["prompt"], row[x]) for x in ("chosen", "rejected")] for row in pref]
    gaps = [chosen - rejected for chosen, rejected in scores]
    # The phrasing of a question changes the words of its echoes, and neither a probability nor a
    # score: one of the five is enough.
    entropies, best_shares = [], []
    for fact in FACTS:
        prompt = questions(*fact)[0]
        dist = crowd(prompt)
        entropies.append(entropy(dist))
        best_shares.append(math.fsum(p for text, p in dist.items() if judge(prompt, text) == BEST))
    return {
        "seed": seed,
        "entropy_per_completion": mean(entropies),
        "val_nats": -math.fsum(math.log(crowd(row["prompt"])[row["completion"]]) for row in sft),
        "label_accuracy": mean([1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in gaps]),
        "label_loss": mean([-math.log(sigmoid(gap)) for gap in gaps]),
        "best_judge": BEST,
        "crowd_judge": mean([judge(row["prompt"], row["completion"]) for row in sft]),
        "crowd_best_share": mean(best_shares),
    }


def write_data(folder, seed=0):
    """Write the six .jsonl files and ceilings.json into a new `folder`; -> (rows, ceilings).

    They are completed in a temporary folder beside it first, so that an interrupted run leaves
    nothing half-written. Raises OSError where that is not possible, or `folder` is there.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; choose another --out, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        # One level down: the temporary folder itself is private to this user.
        staged = Path(temporary) / "data"
        staged.mkdir()
        rows = make_rows(seed)
        for name in rows:
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[name])
            (staged / f"{name}.jsonl").write_bytes(lines.encode())
        limits = ceilings(rows, seed)
        (staged / "ceilings.json").write_bytes((json.dumps(limits, indent=2) + "\n").encode())
        staged.rename(folder)
    return rows, limits


def main():
    parser = argparse.ArgumentParser(
        description="Make the default data set: questions at the zoo and answers of a crowd.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", default="data/zoo", help="new folder to write into")
    text = "draws the rows and the held-out questions"
    parser.add_argument("--seed", type=int, default=0, help=text)
    args = parser.parse_args()
    try:
        rows, limits = write_data(args.out, args.seed)
    except OSError as error:
        parser.exit(2, f"zoo.py: error: {error}\n")
    for name in rows:
        print(f"{name + '.jsonl':24}{len(rows[name]):>8,} rows")
    words = [len(row["completion"].split()) for row in rows["sft_train"]]
    print(f"{'words per completion':24}{mean(words):>8.2f} mean, {max(words)} longest")
    for name, value in limits.items():
        print(f"{name:24}{value:>8.7g}")


if __name__ == "__main__":
    main()

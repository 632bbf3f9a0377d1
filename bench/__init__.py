"""Whatever makes a number or a picture of README.md and RESULTS.md."""

import argparse


def parser(doc):
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

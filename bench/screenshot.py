"""A picture of the page's token view for README.md: bench/tokens.png.

    python -m bench.screenshot out/report.html     (pip install playwright; python -m playwright install chromium)

Shows the responses half-way through a run, coloured by advantage, with the numbers of one token.
"""

import shutil
from pathlib import Path

from bench import parser
from bench.tables import ROOT

WIDTH, RESPONSES = 900, 3


def take(page, out):
    """The section "Token by token", as far as its first responses, and the token that is chosen."""
    last = int(page.locator("#stop").get_attribute("max"))
    page.locator("#stop").fill(str(last // 2))
    hidden = f".response:nth-child(n + {RESPONSES + 1}), #detail ~ *, section > p, #detail h3"
    page.add_style_tag(content=f"{hidden}, #detail ol, #detail details {{ display: none }}")
    page.locator(".response").first.locator(".token").first.click()
    page.locator("section", has=page.locator("#stop")).screenshot(path=out)


def main():
    flags = parser(__doc__)
    flags.add_argument("page", type=Path, help="report.html of a run")
    args = flags.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as it:
        browser = it.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": 1000}, color_scheme="light")
        page.goto(args.page.resolve().as_uri())
        take(page, ROOT / "bench" / "tokens.png")


if __name__ == "__main__":
    main()

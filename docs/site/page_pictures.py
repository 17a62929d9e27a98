"""Takes pictures of the README, a page of the trace viewer, and a service's status page.

`python -m docs.site.page_pictures readme`, `trace` and `status` use a headless Chromium and write
to `docs/pictures/`. Look at each picture before you commit it.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from markdown_it import MarkdownIt

from decoder.plugins.trace.trace import read_as_far
from decoder.plugins.trace.viewer.trace_page import page_of
from foredraft import Credentials, DraftRequest, RemoteDrafter, TokenIds, load_tokenizer
from indexer.tokenizer import DEFAULT_MODEL

ROOT: Final = Path(__file__).parents[2]
PICTURES: Final = ROOT / "docs" / "pictures"
TRACE: Final = PICTURES / "passes.jsonl.gz"
BROWSERS: Final = ("chromium-headless-shell", "chromium", "chromium-browser")
TENANTS: Final = ("acme", "globex", "initech")
# The tenants' engines generate code. The index contains other code of the same project.
REPLAYED: Final = "retriever/*/*.py"
INDEXED: Final = ("indexer", "decoder")
PROMPT: Final = 64  # number of tokens
LONGEST: Final = 1000
BUDGET: Final = 16
PASS_S: Final = 0.02  # duration of one pass of a fast engine
ADDRESS: Final = re.compile(r'address="(127\.0\.0\.1:\d+)"')
SHORTEST: Final = 200  # fewest characters of a paragraph to replay

# Like a README on a code host: same sizes and colours, light or dark as the system is set.
STYLE: Final = """
:root { --ink: #1f2328; --paper: #fff; --line: #d1d9e0; --raised: #f6f8fa; --link: #0969da; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #f0f6fc; --paper: #0d1117; --line: #3d444d; --raised: #151b23; --link: #4493f8; }
}
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", "Liberation Sans", Helvetica, Arial, sans-serif; }
main { max-width: 838px; margin: 0 auto; padding: 24px 16px; overflow-wrap: break-word; }
h1, h2 { border-bottom: 1px solid var(--line); padding-bottom: .3em; line-height: 1.25; }
h1 { font-size: 2em; margin: 0 0 16px; } h2 { font-size: 1.5em; margin: 24px 0 16px; }
a { color: var(--link); } img { max-width: 100%; }
code, pre { font: 85%/1.45 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { background: var(--raised); border-radius: 6px; padding: .2em .4em; }
pre { background: var(--raised); border-radius: 6px; padding: 16px; overflow: auto; }
pre code { font-size: 100%; padding: 0; background: none; }
table { border-collapse: collapse; display: block; width: max-content; max-width: 100%;
  overflow: auto; }
th, td { border: 1px solid var(--line); padding: 6px 13px; }
"""


def readme_page(text: str) -> str:
    """Return a page that shows a README and its pictures as code hosts do."""
    body = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    head = f'<meta charset="utf-8"><base href="{ROOT.as_uri()}/"><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body><main>{body}</main></body></html>"


def take(address: str, output: Path, width: int, height: int) -> None:
    """Write a picture of a page, as a browser window of this size in pixels shows it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("error: no Chromium is installed (chromium-headless-shell)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        subprocess.run(
            [
                browser,
                *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                f"--screenshot={output.resolve()}",
                address,
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )


def take_page(html: str, output: Path, width: int, height: int, fragment: str = "") -> None:
    """Write a picture of a page, scrolled to the place that a URL fragment names."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(html, encoding="utf-8")
        take(f"{page.as_uri()}{fragment}", output, width, height)


@contextmanager
def serving(folder: Path, index: Path, tenants: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Run a service for tenants; yield the address of its status page, and the tenants' tokens."""
    access = folder / "access"
    tokens = [
        foredraft("access", "token", tenant, "--access", str(access)).split()[-1]
        for tenant in tenants
    ]
    command = [sys.executable, "-m", "foredraft", "serve", "--index", str(index)]
    command += ["--address", f"unix:{folder}/drafts", "--access", str(access)]
    command += ["--metrics-address", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as service:
        try:
            lines = (ADDRESS.search(line) for line in service.stderr or ())
            found = next(filter(None, lines), None)
            if found is None:
                raise SystemExit("error: the service ended")
            wait_until_ready(f"http://{found[1]}/ready")
            yield f"http://{found[1]}/", tokens
        finally:
            service.terminate()


def wait_until_ready(address: str, timeout_s: float = 120.0) -> None:
    """Wait until a service is ready for calls."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(address):  # noqa: S310  an address of our own service
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"error: the service was not ready within {timeout_s:.0f} s")


def replay(address: str, token: str, outputs: Sequence[TokenIds], end_s: float) -> None:
    """Draft for outputs one after another, like an engine that generates them.

    Args:
        address: address of the service.
        token: a tenant's access token.
        outputs: token ids of each output.
        end_s: when to stop, on the monotonic clock. The last session stays open.
    """
    drafter = RemoteDrafter(address, credentials=Credentials(token=token))
    for number, output in enumerate(cycle(outputs)):
        session, at, new = f"chat-{number}", PROMPT, output[:0]
        drafter.open(session, output[:PROMPT])
        while at < len(output):
            if time.monotonic() > end_s:
                return
            [tree] = drafter.draft([DraftRequest(session, new, at, BUDGET)])
            new = output[at : at + 1 + len(tree.follow(output[at:]))]
            at += len(new)
            time.sleep(PASS_S)
        drafter.close(session, new)


def foredraft(*arguments: str) -> str:
    """Run a foredraft command, and return what it printed."""
    command = [sys.executable, "-m", "foredraft", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


app: Final = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("readme")
def readme_command(
    output: Annotated[Path, typer.Option(help="File to write.")] = PICTURES / "readme.png",
) -> None:
    """Take a picture of the top of the README."""
    take_page(readme_page((ROOT / "README.md").read_text()), output, 900, 1000)


@app.command("trace")
def trace_command(
    output: Annotated[Path, typer.Option(help="File to write.")] = PICTURES / "trace.png",
) -> None:
    """Take a picture of pass 24 of the saved trace."""
    steps, note = read_as_far(TRACE)
    take_page(page_of(steps, "passes.jsonl", note), output, 1200, 980, fragment="#24")


@app.command("status")
def status_command(
    output: Annotated[Path, typer.Option(help="File to write.")] = PICTURES / "status.png",
    seconds: Annotated[float, typer.Option(help="How long three tenants draft.")] = 180.0,
) -> None:
    """Take a picture of the status page of a service that three tenants use."""
    tokenizer = load_tokenizer(DEFAULT_MODEL)
    pages = [path.read_text() for path in sorted(ROOT.glob(REPLAYED))]
    outputs = [np.asarray(tokenizer.encode(page)[:LONGEST], np.int32) for page in pages]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        index = folder / "code.index"
        foredraft("build", *INDEXED, "--licence", "Apache-2.0", "--output", str(index))
        address, tokens = stack.enter_context(serving(folder, index, TENANTS))
        end_s = time.monotonic() + seconds
        with ThreadPoolExecutor(len(tokens)) as tenants:
            running = [
                tenants.submit(replay, f"unix:{folder}/drafts", token, outputs[place:], end_s)
                for place, token in enumerate(tokens)
            ]
            for each in running:
                each.result()
        take(address, output, 1100, 820)


if __name__ == "__main__":
    app()

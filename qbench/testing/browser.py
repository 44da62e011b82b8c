"""Opening a page in a headless Chromium: what it drew and what it complained of."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--enable-logging=stderr",
    "--virtual-time-budget=60000",
    "--dump-dom",
)


@dataclass(frozen=True, slots=True)
class Opened:
    """What a browser saw of a report.

    Attributes:
        figures: Figures that the page says it drew.
        errors: Figures that it says it could not draw.
        drawings: SVG drawings in the document.
        console: Lines that the page wrote to the console.
    """

    figures: int
    errors: int
    drawings: int
    console: tuple[str, ...]


def open_page(browser: str, page: Path, profile: Path) -> Opened:
    """Open a report and return what the browser saw.

    Args:
        browser: Path of a Chromium.
        page: The page.
        profile: An empty folder for the browser's own files.

    Raises:
        subprocess.SubprocessError: If the browser does not come back.
    """
    command = [browser, *_FLAGS, f"--user-data-dir={profile}", page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    body = re.search(r'<body data-figures="(\d+)" data-errors="(\d+)">', done.stdout)
    return Opened(
        figures=int(body[1]) if body else 0,
        errors=int(body[2]) if body else 0,
        drawings=done.stdout.count('<svg xmlns="http://www.w3.org/2000/svg"'),
        console=tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line),
    )

#!/usr/bin/env python3
"""Pictures of a page as a browser shows it, light and dark, without a network: to be looked at after a change of the figures.

usage: screenshot.py PAGE.html OUT_DIR [HEIGHT]     writes OUT_DIR/light.png and OUT_DIR/dark.png; exit status 77 where there is no browser
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH = 1200


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("screenshot: no browser; apt-get install chromium")
        return 77
    page, out = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    height = sys.argv[3] if len(sys.argv) == 4 else "4000"
    out.mkdir(parents=True, exist_ok=True)
    for scheme, setting in (("light", "1"), ("dark", "0")):
        picture = out.resolve() / f"{scheme}.png"
        picture.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as profile:
            subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
                            "--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={WIDTH},{height}",
                            f"--blink-settings=preferredColorScheme={setting}", f"--screenshot={picture}", page.as_uri()],
                           check=True, timeout=120, stderr=subprocess.DEVNULL)
        if not picture.exists():
            sys.exit("screenshot: the browser wrote no picture")
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())

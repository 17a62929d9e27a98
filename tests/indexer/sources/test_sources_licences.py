import json
from pathlib import Path

import pytest
from identify.vendor.licenses import LICENSES

from tests.indexer.sources.source_reading import json_lines, read_all, write

TEXTS = dict(LICENSES)


def licences(*sources: Path, **options: object) -> dict[str, str]:
    documents, _ = read_all(*sources, **options)
    named = [(Path(document.name).name, document.licence) for document in documents]
    named = [(name, licence) for name, licence in named if "LICEN" not in name.upper()]
    assert len(dict(named)) == len(named)
    return dict(named)


@pytest.mark.parametrize(
    ("head", "licence"),
    [
        ("# SPDX-License-Identifier: MIT", "MIT"),
        ("#!/bin/sh\n# SPDX-License-Identifier:\tApache-2.0\n", "Apache-2.0"),
        ("/* SPDX-License-Identifier: GPL-2.0-or-later */", "GPL-2.0-or-later"),
        ("<!-- SPDX-License-Identifier: CC-BY-4.0-->", "CC-BY-4.0"),
        ("// SPDX-License-Identifier: (MIT OR Apache-2.0)\r\n", "(MIT OR Apache-2.0)"),
        (
            "/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */",
            "GPL-2.0 WITH Linux-syscall-note",
        ),
        ("SPDX-License-Identifier:", ""),
        ("SPDX-License-Identifier:\nMIT", ""),
        ("nothing", ""),
        ("\n" * 3000 + "SPDX-License-Identifier: MIT", ""),
    ],
)
def test_a_file_says_its_licence_in_its_first_lines(
    head: str, licence: str, tmp_path: Path
) -> None:
    (tmp_path / "a.c").write_bytes(head.encode())
    assert licences(tmp_path) == {"a.c": licence}


def test_the_nearest_licence_file_counts_up_to_the_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(tmp_path, LICENSE=TEXTS["Unlicense"])
    write(source, none_md="")
    write(source / "mit", LICENSE_txt=f"\ufeff{TEXTS['MIT']}", a_md="a", deep__deeper__b_md="b")
    write(
        source / "mit/own", COPYING=TEXTS["GPL-3.0"], c_md="c", d_py="# SPDX-License-Identifier: X"
    )
    write(source / "mit/odd", LICENCE_md="All yours.", e_md="e")
    expected = {
        "none.md": "",
        "a.md": "MIT",
        "b.md": "MIT",
        "c.md": "GPL-3.0",
        "d.py": "X",
        "e.md": "",
        "COPYING": "GPL-3.0",
    }
    assert licences(source) == expected
    assert licences(source / "mit/a.md") == {"a.md": ""}
    assert set(licences(source, licence="Mine").values()) == {"Mine"}


def test_all_licences_of_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "LICENSE-MIT").write_text("Copyright (c) 2000 A. Body\n\n" + TEXTS["MIT"])
    (tmp_path / "LICENSE-APACHE").write_text(TEXTS["Apache-2.0"])
    (tmp_path / "LICENSE-ODD").write_text("Odd.")
    (tmp_path / "a.md").write_text("a")
    assert licences(tmp_path) == {"a.md": "Apache-2.0, MIT"}


def test_licence_files_that_cannot_be_read_say_nothing(tmp_path: Path) -> None:
    for number, content in enumerate([b"\xff\xfe", b"x" * (1 << 18)]):
        write(tmp_path / str(number), **{f"{number}_md": "a"})
        (tmp_path / str(number) / "LICENSE").write_bytes(content)
    assert licences(tmp_path) == {"0.md": "", "1.md": ""}


def test_a_folder_or_code_that_is_called_licence_is_no_licence_file(tmp_path: Path) -> None:
    write(tmp_path, LICENSE=TEXTS["MIT"])
    write(tmp_path / "code", license_py="", a_md="a", license__b_md="b")
    assert licences(tmp_path) == {"a.md": "MIT", "b.md": "MIT"}


def test_a_field_holds_the_licence_of_a_line(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "meta": "MIT"},
        {"text": "b", "meta": ["MIT", "ISC", None]},
        {"text": "c", "meta": 5},
        {"text": "d"},
    ]
    write(tmp_path, LICENSE=TEXTS["Zlib"], rows_jsonl=json_lines(*rows))
    found = licences(tmp_path, licence_field="meta")
    expected = ["MIT", "MIT, ISC", "Zlib", "Zlib"]
    assert found == {f"rows.jsonl:{line}": licence for line, licence in enumerate(expected, 1)}
    assert set(licences(tmp_path).values()) == {"Zlib"}
    assert set(licences(tmp_path, licence="Mine", licence_field="meta").values()) == {"Mine"}


def test_json_that_names_a_licence_is_no_licence(tmp_path: Path) -> None:
    write(tmp_path, a_json=json.dumps({"license": "MIT"}))
    assert licences(tmp_path) == {"a.json": ""}

import base64
import random
import string
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from indexer.errors import IndexerError
from indexer.plugins.screening.exclusion import ExcludedPhrases
from indexer.plugins.screening.redaction import (
    PLACEHOLDER,
    Secret,
    SecretFinder,
    email_addresses,
    private_keys,
    redacted,
    url_passwords,
)
from indexer.plugins.screening.screen import ExcludeScope, Screen, ScreenOptions

RNG = random.Random(20)
ALPHANUMERIC = string.ascii_letters + string.digits


def drawn(length: int, alphabet: str = ALPHANUMERIC) -> str:
    return "".join(RNG.choices(alphabet, k=length))


def private_key(kind: str = "RSA ", num_lines: int = 12) -> str:
    body = "\n".join(drawn(64, ALPHANUMERIC + "+/") for _ in range(num_lines))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"


GITHUB = "ghp_" + drawn(36)
KEYS = {
    "github": GITHUB,
    "gitlab": "glpat-" + drawn(20),
    "slack": "xoxb-123456789012-1234567890123-" + drawn(24),
    "stripe": "sk_live_" + drawn(24),
    "google": "AIza" + drawn(35),
    "pypi": "pypi-AgEIcHlwaS5vcmc" + drawn(70),
    "aws": "AKIA" + drawn(16, string.ascii_uppercase + "234567"),
    "anthropic": f"sk-ant-api03-{drawn(93)}AA",
    "encoded": base64.b64encode(f"token={GITHUB}".encode()).decode(),
    "rsa": private_key(),
    "pkcs8": private_key(""),
    "openssh": private_key("OPENSSH "),
    "short": "-----BEGIN EC PRIVATE KEY-----\nMHcCAQ\n-----END EC PRIVATE KEY-----",
    "headed": private_key().replace("-----\n", "-----\nDEK-Info: AES-128-CBC,0-1\n\n", 1),
    "spelt": private_key().replace("\n", "\\n"),
    "indented": private_key().replace("\n", "\r\n    "),
    "long": private_key(num_lines=700),
    "cut": private_key(num_lines=3).partition("\n-----END")[0],
}


@pytest.fixture(scope="module")
def finder() -> SecretFinder:
    return SecretFinder()


def cleaned(finder: SecretFinder, text: str) -> str:
    return redacted(text, finder.find(text))


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("before", ["", "\ufeff\u4e00\U0001f600 "], ids=["ascii", "unicode"])
def test_keys_are_replaced_whole(kind: str, before: str, finder: SecretFinder) -> None:
    text = f"{before}first = '{KEYS[kind]}'\nlast \u00e9\n"
    assert cleaned(finder, text) == text.replace(KEYS[kind], PLACEHOLDER)


@pytest.mark.parametrize("scheme", ["https", "postgres", "mongodb+srv", "my-own"])
@pytest.mark.parametrize("password", ["hunter2", "p%40ss", "a:b@c", drawn(20)])
def test_passwords_in_urls_are_replaced(scheme: str, password: str, finder: SecretFinder) -> None:
    text = f"open {scheme}://bob:{password}@db.internal:5432/x and go on"
    assert cleaned(finder, text) == text.replace(password, PLACEHOLDER)


def test_urls_may_be_spelt_as_in_json(finder: SecretFinder) -> None:
    text = r'"my:\/\/bob:hunter2@host\/x"'
    assert cleaned(finder, text) == text.replace("hunter2", PLACEHOLDER)


def test_headers_of_a_short_key_belong_to_it() -> None:
    key = KEYS["short"].replace("-----\n", "-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: A-1\n\n", 1)
    assert list(private_keys(f"x {key} y")) == [(2, 2 + len(key))]


@pytest.mark.parametrize(
    "address",
    [
        "a@example.org",
        "alice.b+c@mail.example.co.uk",
        "j\u00f6rg@m\u00fcller.de",
        "o'neil_x@xn--bcher-kva.xn--p1ai",
    ],
)
def test_addresses_are_replaced(address: str, finder: SecretFinder) -> None:
    for text in (address, f"<{address}>", f"to {address}, or /home/{address}/notes. **{address}**"):
        assert cleaned(finder, text) == text.replace(address, PLACEHOLDER)


@pytest.mark.parametrize(
    "text",
    [
        "@decorator.name\ndef f(a): return a @ b.T",
        "npm install @angular/core lodash@4.17.21",
        "`@functools.cache` user@localhost a@b a@.com",
        "postgres://{user}:{password}@{host} mysql://u:${PASS}@h ftp://u:%s@h",
        "http://host:8080/a@b https://[::1]:80/ std::vector<int>::at",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "the PRIVATE KEY is kept elsewhere; AKIA is a prefix, password is a word",
        "xAKIA" + "A" * 16 + " AKIA" + "A" * 17,
        "sha1 da39a3ee5e6b4b0d3255bfef95601890afd80709",
    ],
)
def test_what_is_no_secret_stays(text: str, finder: SecretFinder) -> None:
    assert finder.find(text) == []


def test_a_secret_goes_wherever_it_stands_again(finder: SecretFinder) -> None:
    value = drawn(14) + "X9"
    text = f"x://u:{value}@h\nPASS={value}\n{value}{value}"
    assert value not in cleaned(finder, text)
    assert cleaned(finder, text).count(PLACEHOLDER) in {3, 4}


def found_by_library(text: str, *spans: tuple[int, int, str]) -> list[Secret]:
    """Return what is made of secrets that the library finds in a text of ASCII letters."""
    findings = [
        SimpleNamespace(location={"start_offset": start, "end_offset": end}, rule_id=kind)
        for start, end, kind in spans
    ]
    library = SimpleNamespace(
        Rules=lambda **_: None, Scanner=lambda _: SimpleNamespace(scan=lambda _: findings)
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "kingfisher_sdk", library)
        return SecretFinder().find(text)


@given(
    text=st.text("ab1", min_size=10, max_size=40),
    places=st.lists(st.tuples(st.integers(0, 30), st.integers(6, 9)), min_size=1, max_size=3),
)
def test_no_value_of_a_secret_is_left(text: str, places: list[tuple[int, int]]) -> None:
    text *= 2  # so that each value is there again
    spans = [(start, min(start + length, len(text)), "kind") for start, length in places]
    clean = redacted(text, found_by_library(text, *spans))
    values, until = list[str](), 0
    for start, end, _ in sorted(span for span in spans if span[0] < span[1]):
        if start < until:  # they overlap: one value
            values[-1] += text[until:end]
        else:
            values.append(text[start:end])
        until = max(until, end)
    for value in values:
        assert len(value) < 6 or value.isalpha() or value not in clean


def test_secrets_that_overlap_are_one() -> None:
    found = found_by_library("some words", (8, 9, "c"), (3, 8, "b"), (0, 5, "a"))
    assert found == [Secret(0, 8, "a"), Secret(8, 9, "c")]


def test_a_word_is_a_secret_only_where_it_is_one(finder: SecretFinder) -> None:
    text = "x://u:password@h: the password is short as in abc12, not x://u:abc12@h"
    assert cleaned(finder, text) == text.replace(":password@", f":{PLACEHOLDER}@").replace(
        ":abc12@", f":{PLACEHOLDER}@"
    )


def test_secrets_are_found_across_the_windows() -> None:
    finder = SecretFinder(window_bytes=200, overlap_bytes=90)
    for filler in ("x ", "\u4e00\u00e9 ", "\U0001f600 "):
        for shift in range(0, 130, 7):
            text = filler * shift + GITHUB + " " + filler * 100
            assert cleaned(finder, text) == text.replace(GITHUB, PLACEHOLDER)


UNITS = ["-----BEGIN RSA PRIVATE KEY-----\\n", "a@b.", "http://a:", "eyJhbGciOi", "AKIA", 'key="']


@pytest.mark.soak
@pytest.mark.parametrize("units", [[unit] for unit in UNITS] + [UNITS])
def test_time_goes_with_length_on_hostile_lines(units: list[str], finder: SecretFinder) -> None:
    def seconds(num_bytes: int) -> float:
        part = num_bytes // len(units)
        line = "".join((unit * (part // len(unit) + 1))[:part] for unit in units)
        started = time.process_time()
        finder.find(line)
        return time.process_time() - started

    sizes = (10 * 2**20 // 8, 10 * 2**20) if len(units) > 1 else (2**18, 2**21)
    small, large = map(seconds, sizes)
    assert large < 8 * 4 * max(small, 0.02)  # eight times the text; a square would be 64 times


def test_own_rules_take_linear_time_without_the_windows() -> None:
    def seconds(num_bytes: int) -> float:
        started = time.process_time()
        for unit in [
            *UNITS,
            "@",
            "@a.",
            "a.",
            "-",
            "://",
            "A: b\\n",
            "-----BEGIN PRIVATE KEY-----",
        ]:
            line = unit * (num_bytes // len(unit))
            for rule in (email_addresses, url_passwords, private_keys):
                assert sum(1 for _ in rule(line)) >= 0
        return time.process_time() - started

    small, large = map(seconds, (2**17, 2**20))
    assert large < 8 * 4 * max(small, 0.02)


@given(
    text=st.text("ab\n", max_size=30),
    secrets=st.lists(st.tuples(st.integers(0, 29), st.integers(1, 8)), max_size=4),
    removed=st.lists(st.tuples(st.integers(0, 29), st.integers(1, 8)), max_size=4),
)
def test_nothing_of_secrets_and_removed_spans_is_left(
    text: str, secrets: list[tuple[int, int]], removed: list[tuple[int, int]]
) -> None:
    spans = [(start, min(start + length, len(text))) for start, length in secrets]
    secret = [Secret(start, end, "kind") for start, end in spans if start < end]
    gone = [(start, min(start + length, len(text))) for start, length in removed]
    gone = [(start, end) for start, end in gone if start < end]
    covered = {place for s in secret for place in range(s.start, s.end)}
    covered |= {place for start, end in gone for place in range(start, end)}
    kept = redacted(text, secret, gone).replace(PLACEHOLDER, "")
    assert kept == "".join(c for place, c in enumerate(text) if place not in covered)


def test_a_key_is_replaced_though_the_line_that_tells_it_is_left_out() -> None:
    key = KEYS["rsa"]
    options = ScreenOptions(
        ExcludedPhrases(("BEGIN RSA PRIVATE",), (1,)), ExcludeScope.LINE, redact=True
    )
    screened = Screen(options).screen("n", f"before\n{key}\nafter")
    assert screened is not None
    assert screened.text == f"before\n{PLACEHOLDER}\nafter"


def test_a_phrase_that_redaction_makes_is_left_out_too() -> None:
    phrases = ExcludedPhrases(("mail [RED",), (1,))
    for scope in ExcludeScope:
        screen = Screen(ScreenOptions(phrases, scope, redact=True))
        screened = screen.screen("n", "one\nmail a@example.org\ntwo")
        assert screened == (None if scope is ExcludeScope.DOCUMENT else ("n", "one\ntwo", ""))
        assert screen.screen("mail a@example.org", "text") is None


@pytest.mark.parametrize("scope", ExcludeScope)
def test_a_phrase_counts_though_it_is_a_secret_too(scope: ExcludeScope) -> None:
    screen = Screen(ScreenOptions(ExcludedPhrases(("a@example.org",), (1,)), scope, redact=True))
    assert screen.screen("a@example.org", "text") is None
    assert screen.screen("n", "text", "by a@example.org") is None
    screened = screen.screen("n", "one\na@example.org wrote\ntwo")
    assert screened == (None if scope is ExcludeScope.DOCUMENT else ("n", "one\ntwo", ""))


def test_names_and_licences_are_redacted_and_counted() -> None:
    screen = Screen(ScreenOptions(redact=True))
    screened = screen.screen("home/al@example.org/x.py", "text", f"MIT {GITHUB}")
    assert screened == (f"home/{PLACEHOLDER}/x.py", "text", f"MIT {PLACEHOLDER}")
    assert screen.screen("undecodable \udcff al@example.org", "text") is not None
    assert screen.tally.secrets == {"email-address": 2, "github-pat": 1}
    assert screen.tally.num_redacted == 2
    assert "example.org" not in str(screen.tally.to_json())


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kingfisher_sdk", None)
    with pytest.raises(IndexerError, match=r"pip install 'foredraft\[redact\]'"):
        Screen(ScreenOptions(redact=True))
    Screen(ScreenOptions(ExcludedPhrases(("x",), (1,))))

"""Profiles: every number has a unit, a source and a confidence; a wrong file says what is wrong."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from importlib.resources import files

import pytest

from tep.base.errors import UsageError
from tep.sim.profile import load_profile, profile_names, read_profile

NAMES = [
    "cx7_400",
    "cx7_400_ecn",
    "cx7_400_lossy",
    "cx7_400_pfc",
    "cx8_800",
    "efa_1x400",
    "efa_2x200",
    "efa_2x200_congested",
    "efa_4x100",
    "roce_40_ecn",
]


def text_of(name: str) -> str:
    return files("tep.sim").joinpath("profiles", f"{name}.toml").read_text(encoding="utf-8")


def read(tmp_path, text: str):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return read_profile(path)


def test_the_published_machines_are_there() -> None:
    """The demo, the apps and the Cluster name them."""
    assert NAMES == profile_names()
    assert [*[(1, 400)] * 4, (1, 800), (1, 400), (2, 200), (2, 200), (4, 100), (1, 40)] == [
        (profile.nics, profile.link_bps // 10**9) for profile in map(load_profile, NAMES)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_its_source(name) -> None:
    """A number that nobody can trace back cannot be corrected, and looks like a measurement."""
    profile = load_profile(name)

    assert name == profile.name
    for field, number in profile.numbers.items():
        assert len(number.source) > 5, field
        assert number.confidence in {"measured", "quoted", "fitted", "guessed"}, field
        assert getattr(profile, field) >= 0
    assert profile.wire_bps <= profile.link_bps
    assert profile.wire_bps < profile.dma_bps


def test_units_are_brought_to_the_fields(tmp_path) -> None:
    """A nanosecond read as a picosecond is a thousand times too fast, and looks plausible."""
    profile = load_profile("cx7_400")

    assert (74_200, 377_400_000_000, 192 * 1024) == (
        profile.op_ps,
        profile.wire_bps,
        profile.fill_bytes,
    )
    again = read(
        tmp_path, text_of("cx7_400").replace('value = 3\nunit = "us"', 'value = 3000\nunit = "ns"')
    )
    assert replace(again, numbers={}) == replace(profile, numbers={})


def test_a_profile_is_a_value() -> None:
    """A profile changed under a running fabric would make its times mean nothing."""
    profile = load_profile("efa_2x200")
    with pytest.raises(FrozenInstanceError):
        profile.op_ps = 1
    changed = replace(profile, quantum_bytes=1 << 20)
    assert 1 << 20 == changed.quantum_bytes
    assert changed is load_profile(changed), "where a name may stand, a profile may"


def test_unknown_profile_lists_the_known() -> None:
    """A misspelt name should cost one look, not a search."""
    with pytest.raises(
        UsageError,
        match="'cx7' is unknown; there are: " + ", ".join(NAMES),
    ):
        load_profile("cx7")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[nic.wire]", "[nic.wires]", r"unknown: nic\.wires; missing: nic\.wire$"),
        ("[nic.wire]\n", "[nic.wire]\nvlaue = 1\n", r"\[nic\.wire\]: .*unknown field `vlaue`"),
        ("ordered = true\n", "", "missing: ordered$"),
        ("ordered = true", "ordered = 1", "ordered = 1 is not a bool"),
        ("ordered = true", "ordered = true\ncolour = 3", "unknown key 'colour'"),
        ("value = 377.4", 'value = "fast"', r"\[nic\.wire\]: Expected `float`, got `str`"),
        ("value = 377.4", "value = true", r"\[nic\.wire\]: Expected `float`, got `bool`"),
        ("value = 377.4", "value = nan", "nan Gb/s does not fit; a finite number"),
        ("value = 377.4", "value = -1", r"-1\.0 Gb/s|-1 Gb/s"),
        (
            'value = 400\nunit = "Gb/s"',
            'value = 400\nunit = "GB/s"',
            "400 GB/s does not fit; a finite number, in one of b/s, Gb/s",
        ),
        (
            'confidence = "fitted"',
            'confidence = "sure"',
            "Invalid enum value 'sure' - at `\\$.confidence`",
        ),
        (
            'value = 74.2\nunit = "ns"',
            'value = 74.2\nunit = "ps"',
            r"74\.2 ps is 74\.2 ps; whole numbers",
        ),
        ("value = 4.4", "value = 0", r"ack_ps=0 < receive_ps=200000"),
        ('value = 0\nunit = "ns"', 'value = 5\nunit = "ns"', "ordered, but jitter_ps=5000"),
        ("[nic.wire]\n", "[nic.wire\n", "not TOML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, old, new, message) -> None:
    """A key that is silently ignored is a number that silently stays what it was."""
    text = text_of("cx7_400")
    assert old in text

    with pytest.raises(UsageError, match=message):
        read(tmp_path, text.replace(old, new, 1))


def test_a_profile_with_a_base_says_only_what_differs(tmp_path) -> None:
    """A variant that repeats a machine's numbers goes on with the old ones when they are mended."""
    head = 'name = "mine"\nsummary = "one rail"\nbase = "cx7_400"\n'
    number = '[cpu.poll]\nvalue = 128\nunit = "ns"\nsource = "a choice"\nconfidence = "guessed"\n'
    base = load_profile("cx7_400")
    expected = replace(base, name="mine", summary="one rail", poll_ps=128_000, numbers={})

    mine = read(tmp_path, head + number)
    assert expected == replace(mine, numbers={})
    assert base.numbers | {"poll_ps": mine.numbers["poll_ps"]} == mine.numbers
    with pytest.raises(UsageError, match="base = 'cx9' is none of cx7_400"):
        read(tmp_path, head.replace("cx7_400", "cx9"))


def test_empty_source_is_refused(tmp_path) -> None:
    """`source = ""` would satisfy a form and tell nobody anything."""
    lines = [
        'source = ""' if line.startswith("source") else line
        for line in text_of("cx7_400").splitlines()
    ]
    with pytest.raises(UsageError, match=r"at `\$\.source`"):
        read(tmp_path, "\n".join(lines))


def test_missing_file_is_named(tmp_path) -> None:
    """The path is what the reader has to check."""
    with pytest.raises(UsageError, match=r"nowhere\.toml' cannot be read"):
        read_profile(tmp_path / "nowhere.toml")

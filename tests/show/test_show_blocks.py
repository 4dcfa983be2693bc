"""Recordings of an engine and their drawings: what is drawn is what the pool and the tables held."""

import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from helpers.checkpoints import make_checkpoint

from tplab import LLM, SamplingParams, show
from tplab.cache import slot_mapping
from tplab.faults import fault

SVG = "{http://www.w3.org/2000/svg}"
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ALIKE = list(range(1, 9))
PROMPTS = [ALIKE + [20, 21, 22], ALIKE + [30], [40, 41, 42, 43, 44]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("blocks") / "m", "qwen2", seed=3)


def recorded(folder, prompts=PROMPTS, arrivals=None, **options):
    options = {"block_size": 4, "num_blocks": 12, "strict": True, **options}
    with LLM(folder, 1, logical=True, **options) as llm:
        return show.engine_steps(llm, prompts, PARAMS, arrivals)


@pytest.fixture(scope="module")
def run(folder):
    return recorded(folder, arrivals=[0, 1, 2])


def texts(svg):
    return [node.text for node in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_recording_ends_with_the_outputs_of_an_undisturbed_run(folder, run):
    with LLM(folder, 1, logical=True) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [o.outputs[0].token_ids for o in run.outputs] == [o.outputs[0].token_ids for o in outputs]
    assert len(run.moments) == len(run.history) and run.arrivals == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("num_blocks", [12, 5])  # of five, each is handed out to several sequences, one after another
def test_every_moment_has_the_users_and_the_contents_of_its_blocks(folder, run, num_blocks):
    run = run if num_blocks == 12 else recorded(folder, num_blocks=num_blocks, enable_prefix_caching=False)
    for moment in run.moments:
        users = Counter(block for table in moment.tables.values() for block in table)
        assert list(moment.ref_counts) == [users[block] for block in range(run.num_blocks)]
        for number, table in moment.tables.items():
            tokens = [*PROMPTS[number], *run.outputs[number].outputs[0].token_ids][:moment.computed[number]]
            stored = [moment.contents[block][place] for block in table for place in range(4)]
            assert stored[:len(tokens)] == [str(token) for token in tokens]
            assert not any(stored[len(tokens):]), "not written: empty, also in a used block"


def test_the_drawing_names_every_block_with_its_users(run):
    drawn = texts(show.blocks_figure(run, [2]).svg)
    assert "after step 2" in drawn and {"0: seq 0", "seq 1"} < set(drawn) and "0: seq 1" not in drawn
    at = {node.text.split(":")[0]: (float(node.get("x")), float(node.get("y")))
          for node in ET.fromstring(show.blocks_figure(run, [4]).svg).iter(f"{SVG}text") if ": " in (node.text or "")}
    assert at["1"][0] > at["0"][0] and at["1"][1] == at["0"][1] < at["6"][1] == at["11"][1], "six in a line"
    assert drawn.count("seq 1") >= 3
    assert sum(text is not None and text.split(":")[0].isdigit() and ":" in text for text in drawn) == run.num_blocks


def test_a_leaked_block_stands_out(folder):
    run = recorded(folder, strict=False, patches=[fault("block_leaked")])
    figure = show.blocks_figure(run)
    leaked = [block for block, count in enumerate(run.moments[-1].ref_counts) if count]
    assert len(leaked) == 3 and f"leaked blocks {leaked}" in figure.alt_text
    assert [f"{block}: leaked" in texts(figure.svg) for block in leaked] == [True] * 3
    heads = [node.get("fill") for node in ET.fromstring(figure.svg).iter(f"{SVG}rect") if node.get("height") == "16"
             and node.get("fill") != "none"]
    assert [fill == "#D55E00" for fill in heads] == [block in leaked for block in range(run.num_blocks)]


def test_slots_are_drawn_where_the_mapping_puts_them():
    table, tokens = [4, 1, 3], list("abcdefghij")
    figure = show.slots_figure(table, tokens, block_size=4, num_blocks=6)
    root = ET.fromstring(figure.svg)
    at = {}
    for node in root.iter(f"{SVG}text"):
        at.setdefault(node.text, []).append(float(node.get("x")))
    for token, slot in zip(tokens, slot_mapping(table, range(10), 4)):
        assert at[token][-1] == at[str(slot)][-1], f"{token!r} stands above its slot {slot}"
    assert "positions 8–9 in block 3, slots from 12" in figure.alt_text
    inks = {node.text: node.get("fill") for node in root.iter(f"{SVG}text")
            if (node.text or "").isdigit() and float(node.get("y")) > 180}
    assert {slot for slot, ink in inks.items() if ink == "#222"} == set(map(str, slot_mapping(table, range(10), 4)))
    assert len(inks) == 24 and inks["0"] == "#8a8a8a"

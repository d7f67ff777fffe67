"""The options of the SGLang adapter, without SGLang."""

from dataclasses import fields

from engine_adapters.sglang.options import ENGINE_KEYS, Options
from tests.docs.pages import code, page, rows, section


def test_the_guide_lists_every_option_and_no_other() -> None:
    listed = [code(option)[0] for option, *_ in rows(section(page("docs/sglang.md"), "Options"))]
    assert sorted(listed) == sorted(spec.name for spec in fields(Options))


def test_the_engines_own_keys_are_none_of_ours() -> None:
    assert not ENGINE_KEYS & {spec.name for spec in fields(Options)}
    engine = {"backend_name": "kvstore", "module_path": "m", "class_name": "C", "interface_v1": 1, "allocator": "shm"}
    assert Options.parse(engine | {"revision": "r1"}) == Options(revision="r1")


def test_several_addresses_come_as_a_list() -> None:
    assert Options.parse({"revision": "r1", "address": ["a:1", "b:2"]}).address == ("a:1", "b:2")

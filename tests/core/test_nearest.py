"""What is said of a name that does not exist."""

from hetero_gateway.core.nearest import nearest_names


def test_case_and_punctuation_do_not_matter() -> None:
    assert nearest_names("llama3 8b", ["Qwen2-7B", "Llama-3-8B", "Llama-3-70B"])[0] == "Llama-3-8B"


def test_the_beginning_of_a_name_is_nearer_than_a_name_of_its_length() -> None:
    assert nearest_names("H100", ["A100", "H100-80GB-SXM"], 1) == ["H100-80GB-SXM"]


def test_only_names_that_are_like_enough_are_told() -> None:
    names = ["server", "scheduler", "instances"]
    assert nearest_names("servr", names, 1, least=0.6) == ["server"]
    assert nearest_names("zzz", names, 1, least=0.6) == []
    assert nearest_names("zzz", names) == ["instances", "scheduler", "server"]

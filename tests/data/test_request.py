from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedortho.data.images import Dataset, Images, RowIds, make_dataset
from fedortho.data.request import EmptyGroup, ForgetRequest, as_request
from fedortho.errors import BadSetting, FedOrthoError, UnknownName

CLIENTS = dict(enumerate([torch.arange(0, 100), torch.arange(100, 240)]))


NAMES = [
    "3",
    "cat",
    "T-shirt/top",
    "Ankle boot",
    "black, white",
    'the "best"',
    "Men's, 6\"",
    "猫",
    "قطة",
    "बिल्ली",
    "🐈",
    "$x_1$",
    "[b]",
]


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(NAMES) | st.text(min_size=1, max_size=6), unique=True, max_size=4),
    st.lists(st.integers(0, 99), unique=True),
    st.lists(st.from_regex(r"\A([1-9]?[0-9]/)?(0|[1-9][0-9]{0,3})\Z"), unique=True),
)
def test_the_text_form_round_trips(classes: list[str], clients: list[int], samples: list[str]) -> None:
    request = ForgetRequest(tuple(classes), tuple(clients), tuple(samples))
    if classes or clients or samples:
        assert ForgetRequest.parse(str(request)) == request


def test_forget_and_retain_part_the_images(toy: Images) -> None:
    forget, retain = ForgetRequest.parse("class:1,3").split(toy)
    assert set(forget.labels.tolist()) == {1, 3}
    assert sorted(forget.rows.tolist() + retain.rows.tolist()) == list(range(240))


def test_classes_are_found_by_name_number_and_without_regard_to_case(toy: Images) -> None:
    names = ("cat", "Ankle boot", "3", "dog")
    assert ForgetRequest.parse("class:CAT,'ankle boot',3,1").labels(names) == [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ('class:"black, white"', ("black, white",)),
        ("""'class:"black, white"'""", ("black, white",)),  # with the quotes of a shell around it
        ('class:cat,"Men\'s, shoes" client:3', ("cat", "Men's, shoes")),
        ('class:"say ""no"", or"', ('say "no", or',)),
        ("'class:big cat,6\" pipe'", ("big cat", '6" pipe')),
        ("class:'big cat',dog", ("big cat", "dog")),
        ("class:big\\ cat", ("big cat",)),
    ],
)
def test_a_name_with_a_comma_stands_in_double_quotes(text: str, classes: tuple[str, ...]) -> None:
    assert ForgetRequest.parse(text).classes == classes
    assert ForgetRequest.parse(str(ForgetRequest.parse(text))) == ForgetRequest.parse(text)


def test_a_name_that_is_quoted_badly_is_refused() -> None:
    with pytest.raises(FedOrthoError, match=r"is not a list of names: .*; quote them as in CSV"):
        ForgetRequest.parse('class:"a"b"c"')


def test_a_name_of_several_classes_is_refused_with_their_numbers() -> None:
    names = ("crane", "dog", "crane", "Owl", "owl")
    with pytest.raises(FedOrthoError, match="2 classes are called 'crane': 0, 2; name one by number"):
        ForgetRequest.parse("class:crane").labels(names)
    with pytest.raises(FedOrthoError, match="2 classes are called 'OWL': 3, 4"):
        ForgetRequest.parse("class:OWL").labels(names)
    assert ForgetRequest.parse("'class:2, Dog,owl'").labels(names) == [2, 1, 4]
    with pytest.raises(UnknownName, match=r'choose from .*"black, white"'):
        ForgetRequest.parse("class:'black, white'").labels(("black, white", "grey"))


def test_the_canonical_form_names_the_same_classes_if_names_are_numbers_of_others() -> None:
    names = ("1", "10", "2")  # folders of numbered classes, in the order of their names
    for label, name in enumerate(names):
        settled = ForgetRequest.parse(f"class:{name}").settled(names)
        assert ForgetRequest.parse(str(settled)).labels(names) == [label]
        assert settled.settled(names) == settled


def test_a_name_with_accents_is_found_however_its_characters_are_composed() -> None:
    folder, typed = "Gro\u0308ße", "Gr\u00f6ße"  # as file systems of macOS list it, as keyboards type it
    for name, word in ((folder, typed), (typed, folder)):
        asked = ForgetRequest((word,))
        assert asked.labels(["кот", name]) == [1]
        assert asked.spelled(["кот", name]) == ForgetRequest((name,)), "one request, not two"


def test_names_are_spelled_as_the_data_spells_them_and_numbers_stay() -> None:
    names = ["Dress", "ankle boot", "7"]
    asked = ForgetRequest.parse("'class:dress,Ankle Boot,DRESS,1,7' client:4")
    assert asked.spelled(names) == ForgetRequest(("Dress", "ankle boot", "1", "7"), (4,))


def test_samples_come_from_a_file_or_inline_and_may_name_a_client(toy: Images, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("5\n7\n1/2\n")
    request = ForgetRequest.parse(f"samples:{tmp_path / 'ids.txt'}")
    assert request == ForgetRequest.parse("samples:5,7,1/2")
    assert request.split(toy, CLIENTS)[0].rows.tolist() == [5, 7, 102]


def test_one_row_is_one_word_however_its_number_is_written(digits: Dataset, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("007 4/020\n")
    plain = ForgetRequest.parse("samples:7,4/20")
    for text in ("samples:007,4/020", "samples:7,007,٤/20", f"samples:{tmp_path / 'ids.txt'}"):
        assert ForgetRequest.parse(text) == plain, "or a request that was served before is served again"
    assert digits.train.ids is not None
    known = replace(digits.train.ids, key=b"key")
    assert known.by_hash[ForgetRequest.parse("samples:007").hashed(known).samples[0]] == 7


def test_a_sample_of_a_client_that_was_set_aside_is_refused_with_that_reason(toy: Images) -> None:
    rest = toy.subset(torch.arange(240) != 102)
    with pytest.raises(EmptyGroup, match="id 1/2: that image is in the validation set"):
        ForgetRequest.parse("samples:1/2").split(rest, CLIENTS)


def test_several_kinds_at_once_are_joined(toy: Images) -> None:
    request = ForgetRequest.parse("class:0") + ForgetRequest.parse("client:1 samples:1")
    assert request.kind == "mixed"
    rows = set(request.split(toy, CLIENTS)[0].rows.tolist())
    assert rows == {r for r in range(240) if r % 4 == 0} | set(range(100, 240)) | {1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class:9", "no class '9'"),
        ("class:kat", "no class 'kat'"),
        ("class", "is not a request; write class:3"),
        ("klass:3", "did you mean 'class'"),
        ("", "asks for nothing"),
        ("class:,", "asks for nothing"),
        ("client:x", "must be a number"),
        ("client:7", "no client 7; clients run 0 to 1"),
        ("samples:1/500", "client 1 has rows 0 to 139"),
        ("samples:999", "no training image has the id 999"),
        ("samples:nofile.txt", "neither ids nor a readable file"),
        ("class:0,1,2,3", "selects all 240 images"),
        ("class:'", "No closing quotation"),
    ],
)
def test_what_cannot_be_served_is_refused(toy: Images, text: str, message: str) -> None:
    with pytest.raises((FedOrthoError, UnknownName), match=message):
        ForgetRequest.parse(text).split(toy, CLIENTS)


def test_an_empty_selection_and_a_bad_file_are_refused(toy: Images, tmp_path: Path) -> None:
    kept = toy.subset((toy.labels != 2).nonzero().flatten())
    with pytest.raises(EmptyGroup, match="selects none of the 180 images"):
        ForgetRequest.parse("class:2").split(kept)
    (tmp_path / "ids.txt").write_text("\n")
    with pytest.raises(FedOrthoError, match="names no sample"):
        ForgetRequest.parse(f"samples:{tmp_path / 'ids.txt'}")
    (tmp_path / "ids.txt").write_text("5\nfive\n")
    with pytest.raises(FedOrthoError, match="samples:five names neither ids"):
        ForgetRequest.parse(f"samples:{tmp_path / 'ids.txt'}").split(toy)
    with pytest.raises(FedOrthoError, match="trained without clients"):
        ForgetRequest.parse("client:0").split(toy)


def test_hashed_samples_need_no_key_where_no_image_can_be_named(toy: Images) -> None:
    apart = replace(toy, rows=toy.rows - len(toy))
    request = ForgetRequest.parse("class:1 samples:hmac:00")
    assert torch.equal(request.mask(apart), apart.labels == 1)
    with pytest.raises(FedOrthoError, match="its key is not here"):
        request.mask(toy)
    known = replace(toy, ids=RowIds(torch.zeros(len(toy), 32, dtype=torch.uint8), key=b"key"))
    with pytest.raises(FedOrthoError, match="none of the 240 rows has it: there is no such row, or the key is another"):
        request.mask(known)


@pytest.mark.parametrize("word", ["client:", "class:", "samples:", "samples:1/"])
def test_a_number_of_thousands_of_digits_is_refused_in_one_line(digits: Dataset, word: str) -> None:
    with pytest.raises(FedOrthoError) as refused:
        ForgetRequest.parse(word + "9" * 5000).resolved(digits).split(digits.train)
    assert "digits" not in str(refused.value)


def test_a_request_that_is_no_text_is_refused_by_value(toy: Images) -> None:
    with pytest.raises(BadSetting, match="the request is 3; expected text, such as 'class:3'"):
        as_request(3, make_dataset(toy))  # type: ignore[arg-type]


def test_classes_that_are_called_by_their_numbers_are_listed_once(toy: Images) -> None:
    with pytest.raises(UnknownName, match=r"choose from 0, 1, 2, 3$"):
        ForgetRequest.parse("class:Dress").mask(toy)
    with pytest.raises(UnknownName, match=r"choose from 0 to 3, 3, 5, 7, 9$"):
        ForgetRequest.parse("class:Dress").mask(replace(toy, names=("3", "5", "7", "9")))

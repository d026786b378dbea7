"""Questions about pictures: data sets are read as they are, metrics are the published ones, and models answer from the
tokens of an allocator, in batches as alone, under lmms-eval too."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from test_vlm_qwen import IMAGE, MODELS, PAD, WORDS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

import gpu_lod as lod
from gpu_lod.errors import FileError, InputError, UnsupportedError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from quality import lmms, vqa, vqa_answer, vqa_metrics
from quality.vqa import DATASETS, Sample, load
from quality.vqa_answer import Answerer, evaluate

pytestmark = pytest.mark.usefixtures("one_thread")
needs_datasets = pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")

# -- metrics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "answers", "expected"),
    [
        ("Hello\n World", ["hello world"], 1.0),
        ("kitten", ["sitting"], 1 - 3 / 7),
        ("abcd", ["wxyz", "abce"], 0.75),
        ("ab", ["ax"], 0.5),  # the threshold counts
        ("abc", ["axx"], 0.0),
        ("  ab ", ["ac"], 1 - 1 / 5),  # lengths are those that were given
        ("", ["a"], 0.0),
        ("", [""], 1.0),
    ],
)
def test_anls(answer: str, answers: list[str], expected: float) -> None:
    assert vqa_metrics.anls(answer, answers) == pytest.approx(expected)
    assert vqa_metrics.anls("abc", ["axx"], threshold=0.3) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("same", "people", "expected"), [(0, 10, 0), (1, 10, 0.3), (2, 10, 0.6), (3, 10, 0.9), (4, 10, 1), (10, 10, 1),
                                     (2, 3, 4 / 9), (1, 1, 0)]
)  # fmt: skip
def test_accuracy_leaves_one_out(same: int, people: int, expected: float) -> None:
    """Three of ten: the mean of 2/3, three times, and 1, seven times."""
    answers = ["Yes"] * same + ["maybe"] * (people - same)
    for metric in (vqa_metrics.vqa_accuracy, vqa_metrics.textvqa_accuracy):
        assert metric("yes.", answers) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Two  dogs!", "2 dogs"),
        ("An x-ray", "x ray"),
        ("black-white - red", "blackwhite red"),  # nor does one that stands beside a space leave any
        ("1,000 w/o", "1000 wo"),  # a comma in a number takes every mark's place away
        ("3.5 p.m.", "3.5 pm"),
        ("\tcant\n", "can't"),
        ("couldntve couldn'tve couldnt've", "couldntve couldn't've couldn't've"),
        ("none", "0"),
        ("twas 'ows'at somebody'd", "'twas 'ow's'at somebodyd"),
    ],
)
def test_answers_are_normalised(text: str, expected: str) -> None:
    assert vqa_metrics.normalised(text) == expected


def test_textvqa_splits_words_first() -> None:
    people = ["Mike 's diner"] * 10
    assert vqa_metrics.textvqa_accuracy("mike's diner", people) == 1
    assert vqa_metrics.vqa_accuracy("mike's diner", people) == 0
    assert vqa_metrics.textvqa_accuracy("10,x", ["10x"] * 10) == 1
    assert vqa_metrics.vqa_accuracy("10,x", ["10 x"] * 10) == 1


@pytest.mark.parametrize("metric", vqa_metrics.METRICS.values(), ids=vqa_metrics.METRICS)
@pytest.mark.parametrize("answers", [[], "yes"])
def test_metrics_need_a_list_of_answers(metric: vqa_metrics.Metric, answers: Any) -> None:
    with pytest.raises(InputError, match="at least one"):
        metric("yes", answers)


# -- data sets ---------------------------------------------------------------------------------------------------------

SIZES = [(40, 60), (100, 72), (64, 64)]


def pictures() -> list[torch.Tensor]:
    return [torch.randint(256, (3, *size), dtype=torch.uint8) for size in SIZES]


def pillow(picture: torch.Tensor) -> Image.Image:
    return Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())


def rows(name: str) -> list[dict[str, Any]]:
    """Three questions in the columns of a data set, without pictures."""
    said: list[list[Any]] = [["w1", "w2"], ["w3"] * 10, ["w4"]]
    if name == "vqav2":
        said = [[{"answer": one, "answer_confidence": "yes", "answer_id": 1} for one in some] for some in said]
    texts = ["what is w1", "what is w2 w3 w4", "what"]
    return [
        {DATASETS[name].id: 10 + i, "question": texts[i], "answers": said[i], "extra": None} for i in range(len(SIZES))
    ]


def as_jsonl(folder: Path, name: str, shown: list[Any], change: Callable[[Any], None] = lambda _: None) -> Path:
    (folder / "pictures").mkdir(parents=True)
    lines = []
    for number, (row, picture) in enumerate(zip(rows(name), shown, strict=True)):
        row["image"] = f"pictures/{number}.png"
        picture.save(folder / row["image"])
        change(row)
        lines.append(json.dumps(row))
    path = folder / "validation.jsonl"
    path.write_text("\n\n".join(lines), "utf-8")
    return path


def same_samples(found: list[Sample], name: str, shown: list[torch.Tensor]) -> None:
    assert [one.id for one in found] == ["10", "11", "12"]
    assert [one.question for one in found] == [row["question"] for row in rows(name)]
    assert [one.answers for one in found] == [("w1", "w2"), ("w3",) * 10, ("w4",)]
    for one, picture in zip(found, shown, strict=True):
        assert one.image.dtype == torch.uint8 and one.image.is_contiguous() and torch.equal(one.image, picture)


@pytest.mark.parametrize("name", DATASETS)
def test_lines_of_json_and_picture_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # they need no such library
    shown = pictures()
    path = as_jsonl(tmp_path / "set", name, [pillow(picture) for picture in shown])
    (tmp_path / "set" / "test.jsonl").write_text("not read")
    same_samples(list(load(name, path)), name, shown)
    same_samples(list(load(name, str(path.parent))), name, shown)
    assert [one.id for one in load(name, path, limit=2)] == ["10", "11"]


def test_pictures_become_rgb(tmp_path: Path) -> None:
    grey = torch.randint(256, (1, 8, 9), dtype=torch.uint8)
    colour = pillow(pictures()[0])
    alpha, turned = colour.copy(), Image.Exif()
    alpha.putalpha(3)
    turned[0x0112] = 6  # a quarter turn clockwise
    colour.save(tmp_path / "turned.png", exif=turned)
    found = [vqa.rgb(one) for one in (Image.fromarray(grey[0].numpy()), alpha, tmp_path / "turned.png")]
    whole = vqa.rgb(colour)
    assert torch.equal(found[0], grey.expand(3, -1, -1)) and torch.equal(found[1], whole)
    assert torch.equal(found[2], whole.transpose(1, 2).flip(2))
    assert torch.equal(vqa.rgb({"bytes": (tmp_path / "turned.png").read_bytes(), "path": "nowhere.png"}), found[2])
    assert torch.equal(vqa.rgb({"bytes": None, "path": "turned.png"}, tmp_path), found[2])
    for broken in ("missing.png", {"bytes": b"no picture"}, None):
        with pytest.raises(FileError, match="cannot be read"):
            vqa.rgb(broken, tmp_path)


def test_nothing_is_read_before_its_turn(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path / "set", "docvqa", [pillow(picture) for picture in pictures()])
    (path.parent / "pictures" / "1.png").unlink()
    questions = load("docvqa", path)
    assert next(questions).id == "10"
    with pytest.raises(FileError, match=r"1\.png"):
        next(questions)


def test_data_sets_of_another_schema(tmp_path: Path) -> None:
    shown = [pillow(picture) for picture in pictures()]
    path = as_jsonl(tmp_path / "a", "textvqa", shown)
    with pytest.raises(InputError, match=r"has the columns question_id, .*there is no questionId\. Rename"):
        list(load("docvqa", path))
    path = as_jsonl(tmp_path / "b", "textvqa", shown, lambda row: row.update(answers=None))
    with pytest.raises(InputError, match=r"question 10 of .* has no answers"):
        list(load("textvqa", path))
    path.write_text("{}\n[1]")
    with pytest.raises(InputError, match="there is no question_id, image, question, answers"):
        list(load("textvqa", path))
    for text, hint in (("\n{", "line 2 is no JSON"), ("[1]", "line 1 is a list")):
        path.write_text(text)
        with pytest.raises(FileError, match=hint):
            list(load("textvqa", path))
    with pytest.raises(FileError, match=r"holds no test\*.*there are: validation\.jsonl"):
        list(load("textvqa", path.parent, split="test"))
    other = path.rename(path.with_suffix(".csv"))
    with pytest.raises(FileError, match="unknown kind"):
        list(load("textvqa", other))
    with pytest.raises(InputError, match="one of 'docvqa'"):
        load("okvqa")
    with pytest.raises(InputError, match="limit is 0"):
        load("docvqa", limit=0)


@needs_datasets
@pytest.mark.parametrize("name", DATASETS)
def test_what_the_library_stores(name: str, tmp_path: Path) -> None:
    """Parquet and Arrow files with pictures in them, by name and by split, and folders of save_to_disk."""
    import datasets

    shown = pictures()
    table = datasets.Dataset.from_list(
        [{**row, "image": pillow(picture)} for row, picture in zip(rows(name), shown, strict=True)]
    )
    assert isinstance(table.features["image"], datasets.Image)
    folder = tmp_path / "data"
    folder.mkdir()
    for part in range(3):
        table.select([part]).to_parquet(folder / f"validation-{part}-of-3.parquet")
    (folder / "test-0-of-1.parquet").write_text("not read")
    table.to_parquet(tmp_path / "all.parquet")
    table.save_to_disk(tmp_path / "saved", num_proc=None)
    datasets.DatasetDict({"validation": table}).save_to_disk(tmp_path / "splits")
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    for source in (folder, tmp_path / "all.parquet", tmp_path / "saved", tmp_path / "splits", arrow):
        same_samples(list(load(name, source)), name, shown)
    with pytest.raises(InputError, match="no split 'test'; there are validation"):
        list(load(name, tmp_path / "splits", split="test"))
    with pytest.raises(FileError, match=r"test-0-of-1\.parquet cannot be read"):
        list(load(name, folder, split="test"))
    with pytest.raises(InputError, match="there is no answers"):
        table.remove_columns("answers").to_parquet(tmp_path / "none.parquet")
        list(load(name, tmp_path / "none.parquet"))


@pytest.mark.parametrize(
    ("name", "hub", "configuration"),
    [
        ("docvqa", "lmms-lab-encoder/DocVQA", "DocVQA"),
        ("textvqa", "lmms-lab-encoder/textvqa", None),
        ("vqav2", "lmms-lab-encoder/VQAv2", None),
    ],
)
def test_the_hub_is_streamed(name: str, hub: str, configuration: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, calls, drawn = pictures(), [], []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        if args[0].startswith("nobody/"):
            raise ConnectionError("no network")
        for row, picture in zip(rows(name), shown, strict=True):
            drawn.append(row)
            if name == "vqav2":  # as some versions of the library hold lists of records
                row["answers"] = {"answer": [one["answer"] for one in row["answers"]], "answer_id": []}
            yield {**row, "image": pillow(picture)}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    questions = load(name)
    assert not calls
    first = next(questions)
    assert len(drawn) == 1
    same_samples([first, *questions], name, shown)
    assert next(load(name, "somebody/copy", split="train")).id == "10"
    expected = {"streaming": True}
    assert calls == [
        ((hub, configuration), {"split": "validation", **expected}),
        (("somebody/copy", configuration), {"split": "train", **expected}),
    ]
    with pytest.raises(FileError, match="does not come from the hub: no network Pass source="):
        next(load(name, "nobody/here"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[vqa\]'"):
        next(load(name))


# -- answers -----------------------------------------------------------------------------------------------------------

END = "<|im_end|>"
TEMPLATE = """
{%- for message in messages %}{{ message['role'] }} {% for part in message['content'] %}
{%- if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %} assistant{% endif %}"""


@pytest.fixture(scope="module")
def processor() -> Any:
    """Qwen2.5-VL's own, on eighty words."""
    words = ["<unk>", "user", "assistant", "system", "what", "is", *(f"w{i}" for i in range(74))]
    special = {
        "<|image_pad|>": IMAGE, "<|pad|>": PAD, "<|video_pad|>": 92, "<|vision_start|>": 93, "<|vision_end|>": 94,
        END: 95,
    }  # fmt: skip
    vocabulary = {word: index for index, word in enumerate(words)} | special
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token=END, pad_token="<|pad|>",
        additional_special_tokens=[one for one in special if one not in (END, "<|pad|>")],
    )  # fmt: skip
    return Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=TEMPLATE)


def samples() -> list[Sample]:
    torch.manual_seed(3)
    said = [("w1", "w2"), ("w3",) * 10, ("w4",)]
    return [
        Sample(str(row["question_id"]), picture, row["question"], answers)
        for row, picture, answers in zip(rows("textvqa"), pictures(), said, strict=True)
    ]


def speaking(name: str) -> Any:
    """A model that says words alone."""
    model = MODELS[name]()
    with torch.no_grad():
        model.lm_head.weight[WORDS:] = 0  # of random logits the largest is above 0
        model.lm_head.weight[0] = 0
    return model


each_model = pytest.mark.parametrize("name", MODELS)


@each_model
def test_batches_answer_as_one_by_one(name: str, processor: Any) -> None:
    """Pictures of three sizes and prompts of three lengths; the answers are those of `lod.vlm.generate`."""
    model, questions = speaking(name), samples()
    given = {"metric": "anls", "budget": 7, "after": " w9", "max_new_tokens": 5}
    alone = evaluate(model, processor, iter(questions), "FoveatedPyramid", **given)
    texts = [one.text for one in alone.answers]
    for size in (2, 3):
        together = evaluate(model, processor, questions, "FoveatedPyramid", batch_size=size, **given)
        assert together == alone
    expected = []
    for one in questions:
        ids = processor.tokenizer(
            f"user <|vision_start|><|image_pad|><|vision_end|>{one.question} w9{END} assistant", return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            encoded = lod.vlm.encode(
                model, one.image, lod.allocate.FoveatedPyramid(7, 16), processor=processor.image_processor
            )
            words = lod.vlm.generate(model, ids, encoded, max_new_tokens=5, do_sample=False, pad_token_id=PAD)
        expected.append(processor.tokenizer.decode(words[0, ids.shape[1] + 6 :], skip_special_tokens=True))
    assert texts == expected and len(set(texts)) == 3, "too alike to tell anything"


def test_the_metric_of_the_answers(processor: Any) -> None:
    model, questions = speaking("Qwen3-VL"), samples()
    texts = [one.text for one in evaluate(model, processor, questions, "Random", metric="anls", budget=5).answers]
    right = [
        Sample(one.id, one.image, one.question, (text,) * people)
        for one, text, people in zip(questions, texts, (10, 3, 1), strict=True)
    ]
    found = evaluate(model, processor, right, "Random", metric="vqa_accuracy", budget=5)
    assert [one.score for one in found.answers] == pytest.approx([1, 2 / 3, 0])
    assert found.mean == pytest.approx(5 / 9) and found.metric == "vqa_accuracy"
    assert [(one.id, one.question, one.answers) for one in found.answers] == [
        (one.id, one.question, one.answers) for one in right
    ]

    def length(answer: str, answers: Any) -> float:
        return float(len(answer))

    own = evaluate(model, processor, right, "Random", metric=length, budget=5)
    assert own.metric == "length" and own.mean == pytest.approx(sum(map(len, texts)) / 3)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_hints_go_to_the_allocator(processor: Any, monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    model, seen = speaking("Qwen2.5-VL"), []
    encode = lod.vlm.encode

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["fixation"])
        return encode(*args, **kwargs)

    monkeypatch.setattr(lod.vlm, "encode", spy)
    evaluate(
        model, processor, samples(), lod.allocate.FoveatedPyramid(7, 16), metric="anls", batch_size=batch_size,
        max_new_tokens=1, hints=lambda one: {"fixation": (int(one.id) / 20, 0.5)},
    )  # fmt: skip
    assert seen == [(0.5, 0.5), (0.55, 0.5), (0.6, 0.5)]


@pytest.mark.parametrize("size", [(8, 8), (40, 60), (33, 200), (16, 1000)], ids=str)
def test_small_pictures_are_enlarged(size: tuple[int, int]) -> None:
    """Just as much as it takes: of the same shape, and a picture that is large enough stays as it is."""
    picture = torch.randint(256, (3, *size), dtype=torch.uint8)
    found = vqa_answer.enlarged(picture, 16, 40)
    height, width = found.shape[1:]
    if -(-size[0] // 16) * -(-size[1] // 16) >= 40:
        assert found is picture
    else:
        assert found.dtype == torch.uint8 and -(-height // 16) * -(-width // 16) >= 40
        assert height * width < 40 * 16 * 16 * 1.25 and height / width == pytest.approx(size[0] / size[1], rel=0.05)
        assert len(lod.allocate.GridTopK(40, 16)(found).sites) == 40


def test_budgets_larger_than_the_picture_answer(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gestalt too, whose tokens ask for no more pixels."""
    answerer = Answerer(
        speaking("Qwen3-VL"), processor, lod.vlm.Saccades(lod.allocate.GridTopK(20, 16), base=9, budget=20)
    )
    encode, seen = lod.vlm.encode, []
    monkeypatch.setattr(lod.vlm, "encode", lambda *args, **more: seen.append(args[1]) or encode(*args, **more))
    inputs = answerer.inputs(samples()[0].image, answerer.prompt("what"), {})
    assert int((inputs["input_ids"] == IMAGE).sum()) == 29
    assert torch.equal(seen[0], vqa_answer.enlarged(samples()[0].image, 16, 20))
    assert len(answerer.answer([samples()[0].image], ["what"], max_new_tokens=2)) == 1


@each_model
def test_log_likelihood(name: str, processor: Any) -> None:
    """The sum over the tokens, one by one; greedy is what the model says itself, and nothing is likelier."""
    answerer, one = Answerer(speaking(name), processor, "FoveatedPyramid", 7), samples()[1]
    said = answerer.answer([one.image], [one.question], max_new_tokens=2)[0]
    assert len(said.split()) == 2
    value, greedy = answerer.log_likelihood(one.image, one.question, said)
    ids, expected = answerer.prompt(one.question), 0.0
    for word in processor.tokenizer(said).input_ids:
        with torch.no_grad():
            logits = answerer.model(**answerer.inputs(one.image, ids, {})).logits[0, -1]
        expected += float(logits.log_softmax(-1)[word])
        ids = [*ids, word]
    assert greedy and value == pytest.approx(expected, abs=1e-4)
    other, is_greedy = answerer.log_likelihood(one.image, one.question, "w70 " + said.split()[1])
    assert not is_greedy and other != pytest.approx(value)
    with pytest.raises(InputError, match="has no tokens"):
        answerer.log_likelihood(one.image, one.question, "")


def test_prompts_and_answers_are_text(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system prompt goes first, if there is one; special tokens are no part of an answer."""
    model = speaking("Qwen2.5-VL")
    plain, empty, system = (Answerer(model, processor, "Random", 3, system=text) for text in (None, "", "w7"))
    assert (
        plain.prompt("what")
        == empty.prompt("what")
        == processor.tokenizer(f"user <|vision_start|><|image_pad|><|vision_end|>what{END} assistant").input_ids
    )
    assert system.prompt("what") == processor.tokenizer(f"system w7{END}").input_ids + plain.prompt("what")
    said = torch.tensor([processor.tokenizer(f"w1 is w2{END}<|pad|>").input_ids])
    monkeypatch.setattr(model, "generate", lambda input_ids, **_: torch.cat([input_ids, said], dim=1))
    assert plain.answer([samples()[0].image], ["what"]) == ["w1 is w2"]


def test_what_cannot_answer(processor: Any) -> None:
    model = speaking("Qwen2.5-VL")
    allocator = lod.allocate.GridTopK(7, 16)
    with pytest.raises(InputError, match="the budget is 9, and the GridTopK has one of 7"):
        Answerer(model, processor, allocator, 9)
    with pytest.raises(InputError, match="no adapter for Linear"):
        Answerer(torch.nn.Linear(1, 1), processor, allocator)
    with pytest.raises(InputError, match="one of 'anls'"):
        evaluate(model, processor, samples(), allocator, metric="f1")
    with pytest.raises(InputError, match="no samples"):
        evaluate(model, processor, [], allocator, metric="anls")
    with pytest.raises(InputError, match="batch_size is 0"):
        evaluate(model, processor, samples(), allocator, metric="anls", batch_size=0)


# -- lmms-eval ---------------------------------------------------------------------------------------------------------


class CacheHook:
    def __init__(self) -> None:
        self.added: list[tuple[str, Any, Any]] = []

    def add_partial(self, kind: str, request: Any, result: Any) -> None:
        self.added.append((kind, request, result))


def stand_in() -> dict[str, ModuleType]:
    """As much of lmms-eval 0.7 as it takes."""

    class Base:
        def __init__(self) -> None:
            self.cache_hook, self.task_dict = CacheHook(), {}

    class Registry(dict[str, Any]):
        def register_manifest(self, manifest: Any, *, overwrite: bool = False) -> None:
            self[manifest.model_id] = manifest

    class Manifest(SimpleNamespace):
        def __init__(self, model_id: str, simple_class_path: str) -> None:
            super().__init__(model_id=model_id, simple_class_path=simple_class_path)

    known: dict[str, type] = {}

    def register_model(*names: str) -> Callable[[type], type]:
        def decorate(made: type) -> type:
            assert issubclass(made, Base)
            known.update(dict.fromkeys(names, made))
            return made

        return decorate

    contents: dict[str, dict[str, Any]] = {
        "lmms_eval": {}, "lmms_eval.api": {}, "lmms_eval.api.model": {"lmms": Base},
        "lmms_eval.api.registry": {"register_model": register_model, "MODEL_REGISTRY": known},
        "lmms_eval.models": {"MODEL_REGISTRY_V2": Registry()},
        "lmms_eval.models.registry_v2": {"ModelManifest": Manifest},
        "lmms_eval.__main__": {"cli_evaluate": lambda: known.update(arguments=sys.argv[1:])},
    }  # fmt: skip
    found = {}
    for name, content in contents.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(content)
    return found


@pytest.fixture(scope="module")
def pretrained(processor: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model and its processor."""
    folder = tmp_path_factory.mktemp("pretrained")
    model = speaking("Qwen2.5-VL")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=["stand-in", "lmms-eval"])
def model_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "stand-in":
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    elif find_spec("lmms_eval") is None:
        pytest.skip("lmms-eval is not installed")
    lmms.registered.cache_clear()
    yield lmms.GpuLodQwen
    lmms.registered.cache_clear()


class Harness:
    """Three documents, and requests about them as lmms-eval makes them."""

    def __init__(self, model: Any) -> None:
        self.documents = [{"image": pillow(one.image), "question": one.question, "answer": "w5"} for one in samples()]
        self.model = model
        model.task_dict["task"] = {"validation": self.documents}
        self.cache = model.cache_hook = CacheHook()

    def request(self, number: int, *middle: Any, context: str | None = None) -> Any:
        text = self.documents[number]["question"] if context is None else context
        args = (text, *middle[:1], lambda doc: [doc["image"]], *middle[1:], number, "task", "validation")
        return SimpleNamespace(args=args, metadata={})


def test_generate_until(model_class: Any, pretrained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of several settings, in batches, come back in their order, cut at their stops."""
    model = model_class(pretrained, allocator="FoveatedPyramid", budget=7, batch_size="2", device="cpu", system=None)
    harness, answerer = Harness(model), model.answerer
    assert type(model).__name__ == "GpuLodQwen" and answerer.allocator.budget == 7 and not answerer.model.training
    short, long = {"max_new_tokens": 1, "until": ["\n\n"], "image_aspect_ratio": "pad"}, {"max_new_tokens": 4}
    order = [(0, long), (1, short), (2, long), (0, short), (1, long)]
    found = model.generate_until([harness.request(number, settings) for number, settings in order])
    shown = samples()
    expected = [
        answerer.answer([shown[number].image], [shown[number].question], max_new_tokens=settings["max_new_tokens"])[0]
        for number, settings in order
    ]
    assert found == expected and len(set(found)) > 3
    assert {(text, result) for kind, (text, _), result in harness.cache.added if kind == "generate_until"} == {
        (shown[number].question, text) for (number, _), text in zip(order, found, strict=True)
    }
    stop = found[0].split()[1]
    cut = model.generate_until([harness.request(0, {**long, "until": stop}, context="<image>" + shown[0].question)])
    assert cut == [found[0].split(stop)[0]] and cut != [found[0]]
    sampled = {"max_new_tokens": 4, "temperature": 5.0, "top_p": 0.9}
    torch.manual_seed(0)
    assert len({model.generate_until([harness.request(0, sampled)])[0] for _ in range(4)}) > 1
    assert model.generate_until([]) == []
    monkeypatch.setattr(lmms, "MAX_NEW_TOKENS", 3)
    assert len(model.generate_until([harness.request(0, {})])[0].split()) == 3


def test_convention_blank_lines_stop_nothing() -> None:
    assert lmms.cut("w1\n\nw2. w3", ["\n\n", "", "."]) == "w1\n\nw2"


def test_loglikelihood(model_class: Any, pretrained: str) -> None:
    model = model_class(pretrained, allocator="GridTopK", budget=5, device="cpu")
    harness, shown = Harness(model), samples()
    found = model.loglikelihood(
        [harness.request(0, " w5"), harness.request(1, lambda doc: doc["answer"]), harness.request(1, "w6 w7")]
    )
    assert found == [
        model.answerer.log_likelihood(shown[number].image, shown[number].question, text)
        for number, text in ((0, "w5"), (1, "w5"), (1, "w6 w7"))
    ]
    assert len({value for value, _ in found}) == 3 and all(value < 0 for value, _ in found)
    assert harness.cache.added[-1] == ("loglikelihood", (shown[1].question, "w6 w7"), found[2])


def test_generate_until_multi_round(model_class: Any, pretrained: str) -> None:
    """Each round sees the answers before it, a picture of its own, and what the task kept."""
    model = model_class(pretrained, budget=5, base=4, device="cpu", system=None)
    harness, shown, seen = Harness(model), samples(), []
    assert model.answerer.allocator.budget == 9

    def doc_to_text(doc: Any, previous_output: Any, round_idx: int, previous_round_info: Any) -> Any:
        seen.append((list(previous_output), round_idx, previous_round_info))
        text = f"what is {previous_output[-1]}"
        return [pillow(shown[2].image)], text, round_idx == 2, previous_output, {"round": round_idx}

    found = model.generate_until_multi_round([harness.request(0, {"max_new_tokens": 2}, doc_to_text)])
    first = model.answerer.answer([shown[0].image], [shown[0].question], max_new_tokens=2)
    second = model.answerer.answer([shown[2].image], [f"what is {first[0]}"], max_new_tokens=2)
    assert found == [first + second] and type(found[0]) is list
    assert seen == [(first, 1, None), (first + second, 2, {"round": 1})]
    assert harness.cache.added[-1][0] == "generate_until_multi_round" and harness.cache.added[-1][2] == found[0]


@pytest.mark.parametrize("visuals", [[], None, ["film.mp4"], ["two", "pictures"]], ids=str)
def test_requests_about_other_than_one_picture(visuals: Any) -> None:
    with pytest.raises(InputError, match="expected one picture"):
        lmms.picture(visuals)


def test_it_is_registered(model_class: Any) -> None:
    registry = sys.modules["lmms_eval.api.registry"].MODEL_REGISTRY
    manifests = sys.modules["lmms_eval.models"].MODEL_REGISTRY_V2
    assert registry["gpu_lod_qwen"] is model_class is lmms.GpuLodQwen
    manifest = manifests["gpu_lod_qwen"] if isinstance(manifests, dict) else manifests.get_manifest("gpu_lod_qwen")
    assert manifest.simple_class_path == "quality.lmms.GpuLodQwen"
    with pytest.raises(AttributeError, match="Nothing"):
        _ = lmms.Nothing


def test_the_command_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    lmms.registered.cache_clear()
    monkeypatch.setattr(sys, "argv", ["lmms.py", "--tasks", "docvqa_val"])
    lmms.main()
    lmms.registered.cache_clear()
    known = modules["lmms_eval.api.registry"].MODEL_REGISTRY
    assert known["arguments"] == ["--model", "gpu_lod_qwen", "--tasks", "docvqa_val"] and "gpu_lod_qwen" in known


def test_without_lmms_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmms_eval.api.model", None)
    lmms.registered.cache_clear()
    with pytest.raises(UnsupportedError, match="pip install lmms-eval"):
        _ = lmms.GpuLodQwen

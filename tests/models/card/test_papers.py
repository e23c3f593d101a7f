"""`headrace card` and exported folders: cards and papers are what manifests say, and what is missing is listed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import DatasetCard, ModelCard

from foundation.directory import read_manifest, sha256_of_file, verify, write_manifest
from foundation.errors import ConfigError
from pipeline.models.card.facts import CardFacts, Gaps, load_facts, recorded_facts, top_domains
from pipeline.models.card.front_matter import front_matter_of
from pipeline.models.card.lineage import lineage_of, training_lineage
from pipeline.models.card.training_summary import RANGES, size_range, training_summary
from tests import warm
from tests.compress.quantization import test_quantize
from tests.conftest import launch, tiny_config, write_config
from tests.support import output_of, refusal_of

FACTS: dict[str, Any] = {
    "name": "example/river-100k-v1",
    "license": "apache-2.0",
    "language": ["en"],
    "base_model": ["example/spring"],
    "provider": {"name": "Example e.V.", "contact": "models@example.org", "representative": "none"},
    "code_of_practice": False,
}
SUMMARY = "training-content-summary.md"


def needs(module: str, package: str) -> pytest.MarkDecorator:
    """Skips where a package is missing that .ci/run installs."""
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"needs {package}: pip install {package}"
    )


@pytest.fixture(scope="module")
def run_dir(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, evaluated at the last."""
    work = tmp_path_factory.mktemp("run")
    config = tiny_config(tokens, work / "run")
    config["run"]["steps"] = 6
    config.pop("scheduler")
    launch("train.py", write_config(work / "c.json", config), processes=1)
    return work / "run"


@pytest.fixture(scope="module")
def facts(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Facts of two sources, one of which was crawled."""
    work = tmp_path_factory.mktemp("facts")
    (work / "domains.tsv").write_text("".join(f"d{i}.org\t{i * 100}\n" for i in range(1, 31)))
    names = list(read_manifest(tokens, kind="tokens").details["splits"]["train"]["sources"])
    sources = [
        {"name": names[0], "kind": "public", "url": "https://example.org"},
        {"name": names[1], "kind": "crawled"},
    ]
    text = yaml.safe_dump(FACTS | {"sources": sources, "crawl": {"domains": str(work / "domains.tsv")}})
    (work / "facts.yaml").write_text(text)
    return work / "facts.yaml"


@pytest.fixture(scope="module")
def exported(run_dir: Path, facts: Path) -> Path:
    """The run's model, with facts."""
    output_of(warm.run("-m", "pipeline", "export", run_dir, run_dir.parent / "model", "--facts", facts))
    return run_dir.parent / "model"


def card(*arguments: object) -> subprocess.CompletedProcess[str]:
    return warm.run("-m", "pipeline", "card", *arguments)


@pytest.fixture(scope="module")
def dataset(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokens directory with its papers."""
    copied = Path(shutil.copytree(tokens, tmp_path_factory.mktemp("dataset") / "tokens"))
    said = output_of(card(copied))
    assert "provider.name: name of the provider" in said
    return copied


def test_the_hub_reads_the_card_of_a_dataset(dataset: Path) -> None:
    manifest = read_manifest(dataset, kind="tokens")
    assert all(right for _, right in verify(dataset, manifest))
    found = DatasetCard.load(dataset / "README.md")
    assert found.data.size_categories == ["n<1K"]
    for split in manifest.details["splits"].values():
        assert f"{split['documents']:,} documents, {split['tokens']:,} tokens" in found.text
    code = found.text.split("```python\n")[1].split("```")[0]
    assert output_of(warm.run("-c", code.replace("FOLDER", str(dataset)))).strip()


@needs("mlcroissant", "mlcroissant")
def test_croissant_has_the_files_of_the_manifest(dataset: Path) -> None:
    import mlcroissant  # noqa: PLC0415

    loaded = mlcroissant.Dataset(jsonld=dataset / "croissant.json")  # raises where there is an error
    manifest = read_manifest(dataset, kind="tokens")
    assert {file.id: file.sha256 for file in loaded.metadata.file_objects} == {
        name: entry["sha256"] for name, entry in manifest.files.items()
    }
    splits = {row["splits/split"]: row["splits/tokens"] for row in loaded.records("splits")}
    assert splits == {name: split["tokens"] for name, split in manifest.details["splits"].items()}
    inputs = [json.loads(line) for line in (dataset / "sources.jsonl").read_text().splitlines()]
    assert [row["inputs/xxh128"].decode() for row in loaded.records("inputs")] == [row["xxh128"] for row in inputs]


def test_papers_are_not_put_beside_the_files_of_another_directory(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_manifest(tmp_path / "model", kind="model", config={})
    refused = refusal_of(card(dataset, tmp_path / "model"))
    assert "is a finished directory itself" in refused
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["manifest.json"]
    beside = output_of(card(dataset, tmp_path / "papers"))
    assert f"put it beside the shards of {dataset}" in beside


@needs("cyclonedx", "cyclonedx-python-lib")
def test_the_sbom_is_valid_and_names_what_is_installed(dataset: Path) -> None:
    from cyclonedx.schema import SchemaVersion  # noqa: PLC0415
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415

    text = (dataset / "sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    parsed = json.loads(text)
    versions = {part["name"]: part["version"] for part in parsed["components"]}
    assert versions["torch"] == importlib.metadata.version("torch")
    needed = {link["ref"]: link["dependsOn"] for link in parsed["dependencies"]}
    ours = next(ref for ref in needed if ref.startswith("pkg:pypi/headrace@"))
    assert any(ref.startswith("pkg:pypi/deepspeed@") for ref in needed[ours])


def test_papers_of_a_run_are_what_its_manifests_say(run_dir: Path, tokens: Path, tmp_path: Path) -> None:
    said = output_of(card(run_dir, tmp_path / "papers"))
    found = ModelCard.load(tmp_path / "papers" / "README.md")
    (result, *_) = found.data.eval_results
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert result.metric_value == next(row["loss"] for row in rows if row["kind"] == "eval" and row["step"] == 6)
    train = read_manifest(tokens, kind="tokens").details["splits"]["train"]
    summary = (tmp_path / "papers" / SUMMARY).read_text()
    assert f"{train['tokens']:,} tokens, {train['bytes']:,} bytes of UTF-8" in summary
    assert f"[x] {RANGES[0]}" in summary
    assert str(run_dir) not in summary
    listed = {line.split(":")[0].strip() for line in said.splitlines() if line.startswith("  ")}
    assert {"license", "provider.contact", "sources[].kind", "illegal_content", "placed_on_market"} <= listed
    assert {key for key in listed if f"[GAP: {key}]" in summary} == listed - {"license", "language"}


def test_an_export_with_facts_has_them_in_both_papers(exported: Path) -> None:
    manifest = read_manifest(exported, kind="model")
    assert {"README.md", SUMMARY} <= manifest.files.keys()
    found = ModelCard.load(exported / "README.md")
    assert (found.data.license, found.data.language, found.data.base_model) == ("apache-2.0", ["en"], "example/spring")
    assert found.data.model_name == FACTS["name"]
    summary = (exported / SUMMARY).read_text()
    assert "the top 10 % of 30 domains by bytes of text, with 18.7% of the bytes: d30.org, d29.org, d28.org" in summary
    assert "Were crawlers used by the provider or on its behalf? [x] Yes [ ] No" in summary
    assert "licensed" not in summary.split("### 2.3")[1]
    assert "[GAP: provider.name]" not in summary
    handed = recorded_facts(exported)["facts"]
    assert (handed["base_model"], handed["license"]) == ([FACTS["name"]], "apache-2.0")
    assert "name" not in handed


def test_a_card_in_a_manifest_is_not_overwritten(exported: Path) -> None:
    assert "README.md has a checksum in manifest.json" in refusal_of(card(exported, "--replace"))


def test_the_papers_of_a_model_do_not_need_its_parents(exported: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(exported, tmp_path / "model"))
    output_of(card(alone, tmp_path / "papers"))
    assert (tmp_path / "papers" / SUMMARY).read_text() == (exported / SUMMARY).read_text()
    cards = [folder / "README.md" for folder in (tmp_path / "papers", exported)]
    # a manifest's keys are sorted, and so are the rows of a table that is made of one
    assert sorted(cards[0].read_text().splitlines()) == sorted(cards[1].read_text().splitlines())


def test_a_corpus_that_is_gone_is_a_gap_and_no_guess(exported: Path) -> None:
    lineage = lineage_of(exported)
    (corpus,) = lineage["corpora"]
    lineage = lineage | {"corpora": [{"fingerprint": corpus["fingerprint"], "name": None, "weight": 1.0}]}
    gaps = Gaps()
    text = training_summary(lineage, CardFacts(), gaps)
    assert "no manifest of a corpus was found" in gaps.missing["lineage.tokens"]
    assert "the sources are not known" in text
    assert "[x] No" not in text.split("## 2.")[1].split("## 3.")[0]


def test_distillation_is_training_on_the_outputs_of_a_model(exported: Path) -> None:
    lineage = lineage_of(exported)
    step = {**lineage["steps"][0], "step": "distillation", "teacher_fingerprint": "0123456789abcdef"}
    text = training_summary(lineage | {"steps": [step]}, CardFacts(), Gaps())
    synthetic = text.split("### 2.5.")[1].split("### 2.6.")[0]
    assert "[x] Yes [ ] No" in synthetic
    assert "`0123456789ab`" in synthetic
    assert "[GAP: synthetic.models]" in synthetic


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (10**9 - 1, 0), (10**9, 1), (10**13, 1), (10**13 + 1, 2)])
def test_sizes_are_given_in_the_ranges_of_the_template(tokens: int, expected: int) -> None:
    assert size_range(tokens) == RANGES[expected]


def test_a_small_enterprise_lists_five_percent_and_at_most_a_thousand_domains() -> None:
    sizes = {f"{i}.org": i for i in range(1, 30_001)}
    assert len(top_domains(sizes, sme=False).names) == 3000
    assert len(top_domains(sizes, sme=True).names) == 1000  # 5 % are 1,500
    few = top_domains({"a.org": 1, "b.org": 3}, sme=True)
    assert (few.names, few.share) == (["b.org"], 0.75)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"licence": "mit"}, "did you mean 'license'?"),
        ({"sources": [{"name": "a", "kind": "publik"}]}, "did you mean 'public'?"),
        ({"sources": [{"name": "a", "kind": "public"}] * 2}, "two entries of sources"),
        ({"published": "yesterday"}, "published"),
        ({"crawl": {"domains": "nowhere.tsv"}}, "crawl.domains"),
    ],
)
def test_wrong_facts_are_refused_by_name(raw: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        load_facts(tmp_path / "facts.json")


def test_facts_of_a_source_that_the_lineage_lacks_are_refused(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(json.dumps({"sources": [{"name": "wiki", "kind": "public"}]}))
    said = refusal_of(card(run_dir, tmp_path / "papers", "--facts", tmp_path / "facts.json"))
    assert "sources.0.name = 'wiki'" in said
    assert not (tmp_path / "papers").exists()


@pytest.fixture(scope="module")
def river(run_dir: Path) -> Path:
    """The run's model, with few facts."""
    facts, model = run_dir.parent / "facts.json", run_dir.parent / "river"
    facts.write_text(json.dumps({"name": "example/river", "license": "mit"}))
    assert "llama.cpp" in output_of(warm.run("-m", "pipeline", "export", run_dir, model, "--facts", facts))
    return model


def test_an_export_has_a_card_that_its_manifest_lists(river: Path, tokens: Path) -> None:
    manifest = read_manifest(river, kind="model")
    assert "README.md" in manifest.files
    assert all(right for _, right in verify(river, manifest))
    text = (river / "README.md").read_text()
    assert f"`{sha256_of_file(river / 'model.safetensors')}`" in text
    assert f"| optimizer steps | {manifest.details['step']} |" in text
    corpus = read_manifest(tokens, kind="tokens")
    assert corpus.fingerprint[:12] in text
    trained = manifest.details["lineage"]["steps"][-1]
    assert trained["tokens"] == trained["samples"] * trained["sequence_length"]
    assert f"| tokens seen | {trained['tokens']:,} |" in text
    assert str(river.parent) not in text  # a card is published: no paths
    about = front_matter_of(text)
    assert about["library_name"] == "transformers"
    assert about["pipeline_tag"] == "text-generation"


def test_the_snippet_of_the_card_loads_the_folder(river: Path) -> None:
    code = (river / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "Once" in output_of(warm.run("-c", code.replace("FOLDER", str(river))))


@pytest.mark.integration  # a quantization
def test_a_quantized_model_keeps_the_lineage_of_a_lost_source(river: Path, tokens: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(river, tmp_path / "source"))
    config = test_quantize.write_config(tmp_path, source, tokens, scheme="W8A16", consumers=["transformers"])
    output_of(warm.run(test_quantize.ENTRY, "--config", config))
    shutil.rmtree(source)
    manifest = read_manifest(tmp_path / "small", kind="model")
    steps = lineage_of(tmp_path / "small")["steps"]
    assert [step["step"] for step in steps] == ["training", "quantization"]
    assert steps[0] == lineage_of(river)["steps"][0]
    assert steps[1]["mean_kl"]["transformers"] == manifest.details["consumers"]["transformers"]["mean_kl"]
    text = (tmp_path / "small" / "README.md").read_text()
    about = front_matter_of(text)
    assert {"W8A16", "compressed-tensors"} <= set(about["tags"])
    assert (about["license"], about["base_model"]) == ("mit", "example/river")
    assert "Model dependencies: example/river" in (tmp_path / "small" / "training-content-summary.md").read_text()
    (result,) = about["model-index"][0]["results"]
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values["loss"] == manifest.details["after"]["loss_nats"]
    assert "vllm was not run:" in text
    assert all(right for _, right in verify(tmp_path / "small", manifest))


def test_a_folder_from_elsewhere_is_said_to_be_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert [step["step"] for step in lineage_of(tmp_path)["steps"]] == ["given"]


def test_a_manifest_without_a_lineage_is_followed_to_its_parents(river: Path, tmp_path: Path) -> None:
    manifest = read_manifest(river, kind="model")
    copied = Path(shutil.copytree(river, tmp_path / "copied"))
    older = {key: value for key, value in manifest.details.items() if key != "lineage"}
    fields = {"config": manifest.config, "details": older, "files": manifest.files}
    write_manifest(copied, kind="model", parents=manifest.parents, **fields)
    assert lineage_of(copied) == lineage_of(river)
    gone = {"checkpoint": {**manifest.parents["checkpoint"], "path": str(tmp_path / "nowhere")}}
    write_manifest(copied, kind="model", parents=gone, **fields)
    rebuilt = lineage_of(copied)
    assert rebuilt == {"corpora": [], "steps": [{"step": "training", "optimizer_steps": 6, "dtype": "float32"}]}


@pytest.mark.parametrize("changed", [{"weights": [None]}, {"schedule": [[3, [1.0]]]}])
def test_where_a_budget_or_curriculum_decides_no_weight_is_told(river: Path, changed: dict[str, Any]) -> None:
    checkpoint = read_manifest(read_manifest(river, kind="model").parents["checkpoint"]["path"], kind="checkpoint")
    assert training_lineage(checkpoint)["corpora"][0]["weight"] == 1.0
    curve = checkpoint.details["curve"]
    details = {**checkpoint.details, "curve": {**curve, "data": {**curve["data"], **changed}}}
    assert training_lineage(replace(checkpoint, details=details))["corpora"][0]["weight"] is None

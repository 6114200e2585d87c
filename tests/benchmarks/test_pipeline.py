"""The simulation experiment: its report, its cases, and one clear line for what is wrong with a config."""

import builtins
import io
import json

import pytest

from configs import simulate_pipeline
from rhyme_jax.benchmarks import pipeline
from rhyme_jax.errors import InputError
from rhyme_jax.histopipe.simulator import POLICIES
from rhyme_jax.training.console import Console


def config(variant="smoke", **overrides):
    c = simulate_pipeline.get_config(variant)
    with c.unlocked():
        for name, value in overrides.items():
            c.update_from_flattened_dict({name.replace("__", "."): value})
    return c.lock()


def run(**overrides) -> tuple[dict, str]:
    text = io.StringIO()
    return pipeline.run(config(**overrides), Console(text)), text.getvalue()


@pytest.fixture(scope="module")
def smoke():
    return run()


def test_the_report(smoke):
    result, text = smoke
    assert list(result["policies"]) == simulate_pipeline.get_config("smoke").policies.split("+")
    assert result["policies"]["equal"]["throughput_ratio"] == 1
    for name, made in result["policies"].items():
        assert name in text
        assert made["max_staleness"] <= POLICIES[name].staleness
        assert 0 <= made["bubble_ratio"] < 1
        assert len(made["seconds_by_step"]) == 4  # 6 steps less the first epoch
    bounds = result["bounds"]
    for name in ("equal", "spread", "balanced", "longest_first_oracle"):
        assert result["policies"][name]["throughput_ratio"] <= bounds["ratio_with_barrier"]
    for name in ("async", "async_spread", "paper", "cross_step"):
        assert result["policies"][name]["throughput_ratio"] <= bounds["ratio_ahead"]
    json.dumps(result, allow_nan=False)


def test_it_is_the_same_again(smoke):
    again, first = ({k: v for k, v in result.items() if k != "planning_seconds"} for result in (run()[0], smoke[0]))
    assert again == first
    assert set(smoke[0]["planning_seconds"]) == {"balanced", "cross_step"}


def test_scheduling_pays_where_lengths_differ_and_costs_nothing_where_they_do_not(smoke):
    assert smoke[0]["policies"]["balanced"]["throughput_ratio"] > 1.1
    even = {"trace__sigma": 0.0, "trace__hard_share": 0.0, "trace__within": 0.0}
    result, _ = run(policies="equal+balanced", **even)
    assert result["policies"]["balanced"]["throughput_ratio"] == pytest.approx(1, abs=0.01)


def test_useless_forecasts_do_no_harm():
    result, _ = run(policies="equal+balanced", trace__major_shifts=0.81, steps=11)
    assert result["policies"]["balanced"]["throughput_ratio"] >= 0.98


def test_cases_replace_the_config():
    result, text = run(policies="equal", cases="steps=4; system.accelerators=8,system.max_rows=16")
    assert [case["case"] for case in result["cases"]] == ["steps=4", "system.accelerators=8,system.max_rows=16"]
    assert [case["slices"] for case in result["cases"]] == [4, 8]
    assert "--- steps=4" in text


def test_a_run_is_replayed(tmp_path):
    (tmp_path / "samples").mkdir()
    for step in range(6):  # two steps an epoch
        rows = [
            {"prompt": f"p{p + step % 2 * 4}", "sample": i, "length": 5 + p + step + i}
            for p in range(4)
            for i in range(2)
        ]
        (tmp_path / f"samples/step_{step + 1}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorded = {"trace__path": str(tmp_path), "system__accelerators": 2, "system__prompts_per_accelerator": 2}
    result, _ = run(policies="equal+balanced+cross_step", steps=5, **recorded)
    assert (result["groups"], result["trace"]["longest_tokens"]) == (4, 14)
    with pytest.raises(InputError, match=r"^steps: 7 batches of 4 prompts"):
        run(policies="equal", steps=6, **recorded)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"policies": "equal+fastest"}, r"^policies='fastest': must be one of equal, spread, "),
        ({"policies": "balanced"}, r"^policies='balanced': must have 'equal' among them"),
        ({"steps": 0}, r"steps=0: must be at least 1$"),
        ({"system__accelerators_per_slice": 3}, r"^system\.accelerators_per_slice=3: does not divide the 4 "),
        ({"learner__accelerators": 4}, r"does not divide the 0 accelerators that roll out"),
        ({"system__layout": "round"}, r"^system\.layout='round': must be one of best, "),
        ({"system__defer": 0.9}, r"^system\.defer=0\.9: must be a share"),
        ({"system__look_seconds": 0.0}, r"^system\.look_seconds=0\.0: must be above 0$"),
        ({"model__weight_gb": -1.0}, r"^model\.weight_gb=-1\.0: must be above 0$"),
        ({"accelerator__overhead_ms": -1.0}, r"^accelerator\.overhead_ms=-1\.0: must be at least 0$"),
        ({"system__accelerators_per_slice": 1, "system__steps_per_epoch": 1}, r"over_provision needs at least 2$"),
        ({"trace__within": -0.5}, r"^trace\.within=-0\.5: must lie in \[0, 5\]$"),
        ({"trace__path": "/nowhere"}, r"^trace\.path='/nowhere': holds no samples"),
        ({"cases": "steps"}, r"^cases='steps': expected field=value of the config, got 'steps'$"),
        ({"cases": "system.rows=3"}, r"^cases='system\.rows=3': expected field=value of the config"),
        ({"cases": "steps=many"}, r"^cases='steps=many': expected field=value"),
        ({"cases": "trace=1"}, r"^cases='trace=1': expected field=value"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(overrides, message):
    with pytest.raises(InputError, match=message) as e:
        run(**overrides)
    assert "\n" not in str(e.value)


def test_unknown_and_mistyped_fields_are_refused():
    c = simulate_pipeline.get_config("smoke")
    c.system.slice = 1
    with pytest.raises(InputError, match=r"^config\.system\.slice: no such field; did you mean "):
        pipeline.run(c, Console(io.StringIO()))
    c = simulate_pipeline.get_config("smoke")
    del c.trace
    c.trace = 3
    with pytest.raises(InputError, match=r"^config\.trace=3: must be a section of fields$"):
        pipeline.run(c, Console(io.StringIO()))


@pytest.mark.parametrize("variant", simulate_pipeline.VARIANTS)
def test_every_variant_is_valid(variant):
    c = simulate_pipeline.get_config(variant)
    pipeline.Settings.from_config(c)
    for case in pipeline._cases(c):
        pipeline.Settings.from_config(pipeline._overridden(c, case))


def test_pictures(smoke, tmp_path):
    pytest.importorskip("matplotlib")
    pipeline.plot(smoke[0], str(tmp_path / "policies.png"))
    cases = {"cases": [{"case": f"system.accelerators={n}", **smoke[0]} for n in (1, 2)]}
    pipeline.plot(cases, str(tmp_path / "cases.png"))
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("policies.png", "cases.png"))
    with pytest.raises(InputError, match=r"^--plot=.*: cannot be written"):
        pipeline.plot(cases, str(tmp_path / "nowhere" / "x.png"))


def test_without_matplotlib_a_picture_is_refused(monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(InputError, match=r"^--plot: needs matplotlib \(pip install matplotlib\)$"):
        pipeline.pyplot()

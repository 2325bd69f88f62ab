"""Health of a run: what is reported, and what is not, for curves of many shapes."""

import json
import math
import random

import pytest

from backend.runs import EVENTS, events, health


def curve(steps, start=3.0, end=1.0, noise=0.1, seed=0):
    """A loss that falls exponentially, with log-normal noise."""
    rng = random.Random(seed)
    return [(end + (start - end) * math.exp(-5 * n / steps)) * math.exp(rng.gauss(0, noise)) for n in range(steps)]


def alerts(losses, **more):
    watched = health.Curves()
    points = [{"loss": loss, **{key: values[n] for key, values in more.items()}} for n, loss in enumerate(losses)]
    return [(n, alert) for n, point in enumerate(points) for alert in watched.add(point)]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_healthy_curves(noise):
    for seed in range(10):
        losses = curve(1000, noise=noise, seed=seed)
        norms, speeds = curve(1000, 2.0, 0.5, max(noise, 0.3), seed + 100), curve(1000, 900, 1000, 0.2, seed + 200)
        assert not alerts(losses, grad_norm=norms, tokens_per_second=speeds)


def test_a_preference_loss_near_zero():
    """DPO's loss ends near 0, with single batches at a hundred times that value."""
    rng = random.Random(1)
    losses = [0.001 * math.exp(rng.gauss(0, 2)) for _ in range(2000)]
    assert not alerts(losses)


def test_a_spike_that_stays():
    losses = [*curve(200, 3, 2, 0.05), *[6.0] * 30]
    assert [(n, alert.kind) for n, alert in alerts(losses)] == [(201, health.LOSS)]
    assert alerts(losses)[0][1].text.startswith("The loss rose to 6; the median of the last 50 points is 1.99.")


def test_one_point_is_no_spike():
    assert not alerts([*curve(100), 30.0, *curve(100, 1, 1), 30.0, 1.0])


def test_a_second_spike_is_reported_again():
    calm = curve(100, 2, 2, 0.05)
    assert [n for n, _ in alerts([*calm, 9.0, 9.0, 9.0, *calm, 9.0, 9.0])] == [101, 204]


def test_a_level_that_stays_becomes_the_usual_one():
    losses = [*curve(100, 2, 2, 0.05), *curve(100, 8, 8, 0.05), *[30.0] * 5]
    assert [n for n, _ in alerts(losses)] == [101, 201]


def test_too_few_points_say_nothing():
    assert not alerts([2.0] * 19 + [50.0] * 1 + [2.0])
    assert not alerts([2.0] * 18 + [50.0, 50.0])


def rises(losses, ends=True):
    """The alerts about a rise, with the number of points before them."""
    watched = health.Curves()
    found = [(n, alert) for n, loss in enumerate(losses) for alert in watched.add({"loss": loss})]
    found += [(len(losses), alert) for alert in (watched.end() if ends else [])]
    return [(n, alert.text) for n, alert in found if alert.kind == health.RISE]


def test_a_loss_that_explodes_in_a_short_run():
    exploding = [10.76, 10.7, 310.0, 900.0, *[1588.0] * 16]
    assert rises(exploding) == [(6, "The loss rose from 10.8 to 1,588. Lower the learning rate.")]
    assert rises([10.76, 310.0, 500.0, 1588.0]) == [
        (4, "The loss rose from 10.8 to 1,588. Lower the learning rate.")
    ], "few points, and the first steps already explode"
    assert rises([2.3, 2.2, 2.4, *[7.4] * 5])


def test_an_evaluation_confirms_a_rise():
    watched = health.Curves()
    assert not [alert for loss in (2.0, 2.0, 2.0, 90.0) for alert in watched.add({"loss": loss})]
    assert not watched.add({"eval_loss": 2.1})
    watched = health.Curves()
    assert not [alert for loss in (10.0, 400.0) for alert in watched.add({"loss": loss})]
    (alert,) = watched.add({"eval_loss": 500.0})
    assert (alert.kind, alert.text) == (health.RISE, "The loss rose from 10 to 500. Lower the learning rate.")
    assert not watched.add({"eval_loss": 900.0}) and not watched.end(), "once"


def test_a_rise_within_few_steps_and_one_to_the_loss_of_a_random_model():
    """Learning rate 10 with LoRA: six steps, and thirty. The loss of equal probabilities is the logarithm of 49,152."""
    assert rises([1.8, 2.4, 21.0, 50.0, 70.0, 77.0])
    assert rises([1.8, 12.4, 11.0, *[10.8] * 27], ends=False)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 1.0])
def test_noise_is_no_rise(noise):
    for seed in range(100):
        assert not rises(curve(200, noise=noise, seed=seed))
        assert not rises(curve(12, 0.7, 0.7, noise, seed)), "a preference loss that does not fall"
        assert not rises([value / 1000 for value in curve(12, 0.7, 5, noise, seed)]), "near 0"


def test_a_rise_that_recovers_or_was_reported_as_a_spike():
    assert not rises([2.0, 2.0, 2.0, 90.0, 90.0, 90.0, 2.0])
    assert not rises([*curve(100, 2, 2, 0.05), *[30.0] * 20], ends=False)
    assert rises([*curve(100, 2, 2, 0.05), *[30.0] * 20])[0][0] == 120
    assert not rises([math.nan] * 9) and not rises([0.01, 0.02, *[1.5] * 9])


def test_gradients():
    steady = curve(100, 2, 2, 0.05)
    assert [a.kind for _, a in alerts([*steady, 2.0, 2.0], grad_norm=[*steady, 40.0, 60.0])] == [health.GRADIENT]
    small = [norm / 1000 for norm in steady]
    assert not alerts([*steady, 2.0, 2.0], grad_norm=[*small, 0.5, 0.5])  # below any usual max_grad_norm
    assert not alerts([*steady, 2.0, 2.0], grad_norm=[*steady, math.inf, math.inf])  # fp16 skips such a step


def test_throughput():
    speeds = curve(100, 1000, 1000, 0.05)
    ((n, alert),) = alerts(curve(105), tokens_per_second=[*speeds, *[400.0] * 5])
    assert (n, alert.kind) == (102, health.THROUGHPUT)
    assert "400 tokens/s" in alert.text
    assert not alerts(curve(106), tokens_per_second=[*speeds, 400.0, 400.0, 1000.0, 400.0, 400.0, None])


@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, "infinite")])
def test_a_loss_that_is_not_finite(value, name):
    found = alerts([*curve(5), value, value, value, 2.0, value])
    assert [(n, alert.kind) for n, alert in found] == [(5, health.NOT_FINITE), (9, health.NOT_FINITE)]
    assert found[0][1].text == f"The loss is {name}."


def ranks(probes, data=None, busy=None):
    return [
        {"host": "n", "device": f"cuda:{rank}", "probe": probe, "data": (data or [0.0] * 9)[rank]}
        | ({"utilization": busy[rank]} if busy else {})
        for rank, probe in enumerate(probes)
    ]


def measured(*samples):
    watched = health.Ranks()
    return [alert for sample in samples for alert in watched.add(sample)]


def test_a_slow_rank_is_named_once():
    slow = ranks([1.0, 1.0, 1.9, 1.05])
    (alert,) = measured(*[slow] * 12)
    assert alert.kind == health.SLOW_RANK
    assert alert.text.startswith("Rank 2 (cuda:2 on n) is slow: a matmul takes 1.9 times as long as on the other ranks")
    assert not measured(*[ranks([1.0, 1.2, 1.3, 1.05])] * 12)
    assert not measured(*[slow] * 4)
    assert not measured(*[ranks([1.0])] * 12)


def test_one_slow_measurement_is_an_accident():
    good = ranks([1.0, 1.0, 1.0])
    assert not measured(*[good] * 4, ranks([1.0, 1.0, 2.5]), *[good] * 8)


def test_a_rank_that_is_slow_again():
    good, bad = ranks([1.0, 1.0]), ranks([1.0, 3.0])
    assert len(measured(*[bad] * 6, *[good] * 6, *[bad] * 6)) == 2


def test_waiting_for_batches_and_an_idle_gpu():
    (alert,) = measured(*[ranks([1.0, 1.0], data=[0.02, 0.6])] * 9)
    assert alert.kind == health.DATA
    assert "Rank 1" in alert.text
    assert "60%" in alert.text and "Raise train.dataloader_num_workers" in alert.text
    streaming = health.Ranks(can_add=False)  # the checks refuse more than one worker
    (alert,) = (each for _ in range(9) for each in streaming.add(ranks([1.0, 1.0], data=[0.02, 0.6])))
    assert "Set data.streaming to false" in alert.text and "dataloader_num_workers" not in alert.text
    (alert,) = measured(*[ranks([1.0, 1.0], busy=[97.0, 3.0])] * 9)
    assert (alert.kind, "Rank 1" in alert.text, "3%" in alert.text) == (health.IDLE, True, True)


def test_a_disk_that_is_nearly_full():
    disk = health.Disk()
    assert not disk.add(5 * 10**9, 0)
    assert not disk.add(5 * 10**9, 3 * 10**9)
    (alert,) = disk.add(4 * 10**9, 3 * 10**9)
    assert alert.text == "The disk is nearly full: 3.73 GiB is free, and a checkpoint takes 2.79 GiB."
    assert not disk.add(3 * 10**9, 3 * 10**9)
    assert not disk.add(30 * 10**9, 3 * 10**9)
    assert disk.add(1 * 10**9, 3 * 10**9)
    assert health.Disk().add(10**9, 0)


def write(folder, *found):
    lines = [json.dumps({"kind": kind, "step": step, "time": 1.0, "text": text}) for kind, step, text in found]
    (folder / EVENTS).write_text("\n".join(lines) + "\n")


def test_events_of_repeated_steps_are_dropped(tmp_path):
    write(tmp_path, ("saved", 5, ""), ("disk", 7, "full"), ("saved", 10, ""), ("resumed", 5, ""), ("saved", 10, ""))
    assert [(event["kind"], event["step"]) for event in events.read(tmp_path)] == [
        ("saved", 5), ("resumed", 5), ("saved", 10),
    ]  # fmt: skip
    assert events.alerts(tmp_path) == []


def test_saves_do_not_displace_an_alert(tmp_path):
    write(tmp_path, ("disk", 1, "full"), *(("saved", step, "") for step in range(2, 9)), ("loss spike", 9, "up"))
    assert [event["step"] for event in events.newest(tmp_path, 2)] == [1, 7, 8, 9]
    assert [event["step"] for event in events.newest(tmp_path, 1)] == [8, 9]


def test_foreign_and_torn_lines(tmp_path):
    write(tmp_path, ("disk", 7, "full"))
    with (tmp_path / EVENTS).open("a") as file:
        file.write('nonsense\n[1]\n{"kind": "disk"}\n{"kind": "disk", "step": "x"}\n{"kind": "disk", "step": 9')
    found, offset = events.since(tmp_path, 0)
    assert [event["step"] for event in found] == [7]
    with (tmp_path / EVENTS).open("a") as file:
        file.write("}\n")
    later, end = events.since(tmp_path, offset)
    assert ([event["step"] for event in later], events.since(tmp_path, end)[0]) == ([9], [])
    assert events.read(tmp_path / "nowhere") == []

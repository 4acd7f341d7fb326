"""Which workers of a pool are ready, start or drain."""

import msgspec

from shared.protocol.messages import PoolReport, WorkerSlot
from shared.scaling.pools import WorkerLoad
from tests.autoscaler.conftest import ENGINE, beat, report, two_pools
from workers.autoscaler.presence import Presence

POOL = two_pools().by_name[ENGINE]


def test_a_slot_starts_until_its_process_has_a_heartbeat() -> None:
    presence = Presence(POOL)
    slots = report([WorkerSlot(7, 70)])
    assert presence.look(slots, [], 10.0).starting == {"7": 0.0}
    assert presence.look(slots, [], 12.0).starting == {"7": 2.0}
    workers = presence.look(slots, [beat(70, held=3, arena_pinned=1)], 13.0)
    assert workers.ready == (WorkerLoad("7", 3, 1),)
    assert workers.starting == {}
    assert workers.cold_starts_s == (3.0,)


def test_a_worker_without_a_heartbeat_for_a_moment_does_not_start_again() -> None:
    """A broker that has restarted has no heartbeats. Old workers must not look like late starts."""
    presence = Presence(POOL)
    slots = report([WorkerSlot(7, 70)])
    presence.look(slots, [beat(70, held=3)], 10.0)
    assert presence.look(slots, [], 11.0).ready == (WorkerLoad("7", 3),)


def test_a_process_that_is_replaced_starts_again() -> None:
    presence = Presence(POOL)
    presence.look(report([WorkerSlot(7, 70)]), [beat(70)], 10.0)
    replaced = report([WorkerSlot(7, 71)])
    assert presence.look(replaced, [], 11.0).starting == {"7": 0.0}


def test_a_worker_that_dies_again_and_again_has_one_start() -> None:
    presence = Presence(POOL)
    for at_s in range(5):
        slots = report([WorkerSlot(7, 70 + at_s)])
        workers = presence.look(slots, [], float(at_s))
    assert workers.starting == {"7": 4.0}


def test_a_worker_of_another_pool_of_the_model_does_not_count() -> None:
    presence = Presence(POOL)
    other = msgspec.structs.replace(beat(71), pool="large")
    workers = presence.look(report([WorkerSlot(7, 70)]), [beat(70), other], 10.0)
    assert workers.ready == (WorkerLoad("7"),)
    assert workers.others == ()


def test_a_worker_that_has_died_is_no_worker_of_another_actuator() -> None:
    """Its last heartbeat is read for seconds; counted, its replacement would be superfluous."""
    presence, last = Presence(POOL), beat(70)
    presence.look(report([WorkerSlot(7, 70)]), [last], 10.0)
    for slots in ([WorkerSlot(7)], [WorkerSlot(7, 71)], []):
        workers = presence.look(report(slots), [last], 11.0)
        assert (workers.ready, workers.others) == ((), ())
    # One that was started by hand has the same process id later.
    presence.look(report([]), [], 12.0)
    assert len(presence.look(report([]), [last], 13.0).others) == 1


def test_slots_without_processes_are_a_number_of_workers() -> None:
    pods = PoolReport(ENGINE, "kubernetes", "", [WorkerSlot(n) for n in range(3)])
    beats = [beat(7, host="here", held=1), beat(7, host="there", held=2)]
    workers = Presence(POOL).look(pods, beats, 0.0)
    assert [len(workers.ready), len(workers.starting), len(workers.others)] == [2, 1, 0]


def test_a_worker_outside_of_the_pods_is_another() -> None:
    pods = PoolReport(ENGINE, "kubernetes", "", [WorkerSlot(0), WorkerSlot(1)])
    pod = msgspec.structs.replace(beat(7), hostname=f"{POOL.deployment}-5d4f-x2")
    other = msgspec.structs.replace(beat(8), hostname="workstation")
    workers = Presence(POOL).look(pods, [pod, other], 0.0)
    assert [len(workers.ready), len(workers.starting)] == [1, 1]
    assert [load.name for load in workers.others] == ["engine-8"]


def test_workers_that_drain_or_were_started_by_hand_are_distinguished() -> None:
    slots = report([WorkerSlot(1, 10), WorkerSlot(2, 20, draining=True)])
    beats = [beat(10), beat(20), beat(30), beat(10, host="there"), beat(40, role="encoder")]
    workers = Presence(POOL).look(slots, beats, 0.0)
    assert [load.name for load in workers.ready] == ["1"]
    assert workers.num_draining == 1
    assert [load.name for load in workers.others] == ["engine-30", "engine-10"]


def test_a_worker_that_is_faster_than_the_report_is_no_other() -> None:
    """Otherwise it and its slot would be two workers, and one of them would have to go."""
    presence = Presence(POOL)
    workers = presence.look(report([WorkerSlot(7)]), [beat(70), beat(71)], 10.0)
    assert (list(workers.starting), workers.others) == (["7"], ())
    workers = presence.look(report([WorkerSlot(7, 70)]), [beat(70), beat(71)], 11.0)
    assert [load.name for load in workers.ready] == ["7"]
    assert [load.name for load in workers.others] == ["engine-71"]
    # An other one that is known stays one while further workers start.
    slots = report([WorkerSlot(7, 70), WorkerSlot(8)])
    workers = presence.look(slots, [beat(70), beat(71), beat(80)], 12.0)
    assert [load.name for load in workers.others] == ["engine-71"]


def test_the_last_heartbeat_of_a_killed_worker_is_no_other() -> None:
    presence = Presence(POOL)
    presence.look(report([WorkerSlot(7, 70)]), [beat(70)], 10.0)
    workers = presence.look(report([WorkerSlot(7, 71)]), [beat(70)], 11.0)
    assert (list(workers.starting), workers.others) == (["7"], ())


def test_equal_process_ids_of_two_containers_are_two_workers() -> None:
    """A worker without payloads has a host, but no address."""
    presence = Presence(POOL)
    here = msgspec.structs.replace(beat(7), blobs=None, host="here")
    there = msgspec.structs.replace(here, worker="engine-there", host="there", load={"held": 5.0})
    workers = presence.look(report([WorkerSlot(0, 7)]), [here, there], 0.0)
    assert workers.ready == (WorkerLoad("0", 0),)
    assert [load.name for load in workers.others] == ["engine-there"]
    # A worker of an older version has no host.
    older = msgspec.structs.replace(here, host="")
    workers = Presence(POOL).look(report([WorkerSlot(0, 7)]), [older], 0.0)
    assert workers.ready == (WorkerLoad("0", 0),)

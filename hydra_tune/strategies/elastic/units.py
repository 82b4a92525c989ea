"""Units of an elastic trial: train a client's next batches, and copy the centre into the trial's state."""

from __future__ import annotations

from typing import Any

from hydra_tune.core.random_state import RandomState
from hydra_tune.core.seeds import seed_everything, trial_seed
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.spill.store import SpillFiles
from hydra_tune.spill.stored_tree import read_state, write_state
from hydra_tune.strategies.elastic.centre import Centre, shards_of
from hydra_tune.strategies.elastic.client import Client
from hydra_tune.strategies.elastic.work import ClientAssignment, ClientDone, Work
from hydra_tune.strategies.subnets.phase import State
from hydra_tune.strategies.subnets.units import Resident, SubnetTooLarge, centre_of, taken_up
from hydra_tune.strategies.subnets.work import Spot


def train_client(context: WorkerContext, attempt: str, spot: Spot, seat: ClientAssignment, work: Work) -> ClientDone:
    """Train on the batches of `work`, with exchanges; then write the client's state for the next device."""
    held = taken_up(context, attempt, spot)
    client = _client(context, held, spot, seat)
    client.on_step = context.alive
    if work.epoch != client.epoch and held.kit.candidate.schedule_every == "epoch":
        client.take_options(read_state(spot.files())["groups"])  # the schedule has advanced since
    before = client.server_bytes, client.collective_bytes, client.exchanges, client.steps
    client.work(work)
    held.peak = max(held.peak, client.peak_bytes)
    context.unit_peak_bytes = held.peak
    if held.peak > context.setup.memory:
        raise SubnetTooLarge(held.peak, context.setup.memory, context.setup.device, what="a client")
    if seat.rank == 0:
        write_state(_files(spot, seat.client), {"version": seat.version + 1, **client.state()})
    held.clients = {seat.client: (seat.version + 1, client)}
    return ClientDone(
        client.steps - before[3], client.loss_rows, client.loss_sum, client.exchanges - before[2],
        client.server_bytes - before[0], client.collective_bytes - before[1],
    )  # fmt: skip


def _client(context: WorkerContext, held: Resident, spot: Spot, seat: ClientAssignment) -> Client:
    """Return the client as of its last unit: from this worker, from its file, or, if new, from the centre."""
    version, client = held.clients.pop(seat.client, (0, None))
    held.clients.clear()
    if client is not None and version == seat.version and (client.rank, client.size) == (seat.rank, seat.size):
        return client  # type: ignore[no-any-return]
    trial: State = read_state(spot.files())
    centre = centre_of(spot, shards_of(trial["tensors"], seat.shards))
    if seat.version == 0:
        # The first client continues the trial's own random stream.
        stream = trial["random"][0] if (seat.client, seat.rank) == (0, 0) else _stream(held, seat)
        state = {**trial, "tensors": centre.read(), "random": [stream]}
    else:
        state = read_state(_files(spot, seat.client))
        assert state["version"] == seat.version, "a client of another time"
        if seat.rank:
            state["random"] = [_stream(held, seat)]
    made = Client(held.kit, state, context.device, centre, rank=seat.rank, size=seat.size)
    if held.peak:
        made.is_measured()
    return made


def _stream(held: Resident, seat: ClientAssignment) -> dict[str, Any]:
    """Return a new random state for this worker of the client."""
    before = RandomState.capture()
    seed_everything(trial_seed(held.kit.seed, hash((seat.client, seat.version, seat.rank)) % 2**31))
    found = RandomState.capture().state()
    before.restore()
    return found


def collect(
    context: WorkerContext, attempt: str, spot: Spot, position: dict[str, Any], client: int | None, shards: int,
    centred: bool,
) -> None:  # fmt: skip
    """Copy the centre and the position into the trial's state.

    Without a centre the state is that of its one `client`. With a centre, a client supplies only the progress of a
    per-step schedule; a per-epoch schedule belongs to the trial.
    """
    kit = taken_up(context, attempt, spot).kit
    files = spot.files()
    state: State = read_state(files)
    names = ["groups", "scheduler"] if kit.candidate.schedule_every == "step" else []
    if centred:
        centre: Centre = centre_of(spot, shards_of(state["tensors"], shards))
        state["tensors"] = centre.read()
    else:
        names += ["tensors", "optimizer", "random"]
    if client is not None:
        found = read_state(_files(spot, client))
        state |= {name: found[name] for name in names}
    write_state(files, {**state, "position": {**state["position"], **position}})


def leave(context: WorkerContext, attempt: str, spot: Spot, client: int) -> None:
    """Remove the state of a client that has left."""
    held = taken_up(context, attempt, spot)
    held.clients.pop(client, None)
    _files(spot, client).remove()


def _files(spot: Spot, client: int) -> SpillFiles:
    return spot.files(f"client-{client}")

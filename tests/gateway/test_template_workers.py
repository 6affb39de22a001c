"""Templates run in processes that nothing they do can hold up, and that are replaced when they do."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gateway import template_workers
from gateway.template_process import HEADER, pack_question
from gateway.template_workers import NUM_WORKERS, TemplateSource, TemplateWorkers, WorkerTemplate
from holdback.errors import ConfigError, ErrorReason, InternalError, InvalidArgumentError, ResourceExhaustedError

USER = [{"role": "user", "content": "h\u00e9"}]
ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
ON_REQUEST = "{% if messages[0].content == 'slow' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
HUNGRY = "{% set x = 'a' * 1500000000 %}{{ x | length }}"
SLOW = [{"role": "user", "content": "slow"}]

pytestmark = pytest.mark.loopback  # real processes

Start = Callable[..., Awaitable[tuple[TemplateWorkers, list[WorkerTemplate]]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    made: list[TemplateWorkers] = []

    async def start(*sources: str | None, timeout_s: float = 30.0) -> tuple[TemplateWorkers, list[WorkerTemplate]]:
        workers = TemplateWorkers(timeout_s)
        made.append(workers)
        templates = [
            workers.add(TemplateSource(f"model {number}", source, {"bos_token": "<s>"}))
            for number, source in enumerate(sources)
        ]
        await workers.start()
        return workers, templates

    yield start
    for workers in made:
        await workers.close()


async def refusal(template: WorkerTemplate, messages: list[dict[str, str]] = USER) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        await template.render(messages)
    assert caught.value.reason is ErrorReason.CHAT_TEMPLATE_FAILED
    return caught.value


async def test_each_model_has_its_own_template(start: Start) -> None:
    _, templates = await start("{{ bos_token }}{{ messages[0].content }}", "other {{ messages[0].role }}")
    assert [await template.render(USER) for template in templates] == ["<s>h\u00e9", "other user"]


async def test_a_template_sees_each_field_as_it_was_sent_and_its_prompt_comes_back_as_it_was_written(
    start: Start,
) -> None:
    _, [template] = await start("{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m | length }}]{% endfor %}")
    contents = ["", "\x00\x01\r\n\u2028", '"\\', "\U0001f600\u00e9", "a"]
    messages = [{"role": f"r{number}", "content": content} for number, content in enumerate(contents)]
    expected = "".join(f"[r{number}|{content}|2]" for number, content in enumerate(contents))
    assert await template.render(messages) == expected


def test_what_goes_to_a_template_is_as_long_as_its_text_whatever_that_is() -> None:
    for character in ("\x01", "\U0001f600", '"'):
        content = character * 10_000
        assert len(pack_question(0, [{"role": "user", "content": content}])) < len(content.encode()) + 200


@pytest.mark.case("B51")
async def test_what_a_template_raises_comes_back_with_its_message(start: Start) -> None:
    _, [template] = await start("{{ raise_exception('roles must alternate') }}")
    error = await refusal(template)
    assert error.message == "the chat template refused chat.messages: roles must alternate"
    assert error.field == "chat.messages"


@pytest.mark.case("B51")
async def test_a_model_without_template_refuses_every_conversation(start: Start) -> None:
    _, [template] = await start(None)
    assert "no chat template" in (await refusal(template)).message


@pytest.mark.case("B72")
async def test_a_template_that_takes_too_long_is_ended_and_the_next_conversation_is_served(start: Start) -> None:
    _, [template] = await start(ON_REQUEST, timeout_s=2)
    error = await refusal(template, SLOW)
    assert error.message.endswith("it took longer than template_timeout_s, which is 2 s")
    assert await template.render(USER) == "h\u00e9"


@pytest.mark.case("B72")
async def test_the_loop_and_other_conversations_go_on_while_one_is_slow(start: Start) -> None:
    _, [template] = await start(ON_REQUEST)
    slow = asyncio.create_task(template.render(SLOW))
    answers = [await template.render(USER) for _ in range(3)]  # a second process is started for them
    assert answers == ["h\u00e9"] * 3
    assert not slow.done()
    slow.cancel()


@pytest.mark.case("B72")
async def test_a_template_that_wants_too_much_memory_is_refused(start: Start) -> None:
    _, [template] = await start(HUNGRY)
    assert "more memory than it may have" in (await refusal(template)).message


async def test_a_process_that_dies_fails_its_conversation_and_no_other(start: Start) -> None:
    workers, [template] = await start(ON_REQUEST)
    pid = workers._idle[0].pid
    slow = asyncio.create_task(template.render(SLOW))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the exchange has a task of its own
    assert not workers._idle
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InvalidArgumentError, match="it ended the process"):
        await slow
    assert await template.render(USER) == "h\u00e9"


async def test_who_gives_up_leaves_no_answer_for_the_next(start: Start) -> None:
    _, [template] = await start("{{ messages[0].content }}")
    given_up = asyncio.create_task(template.render([{"role": "user", "content": "theirs"}]))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await template.render(USER) == "h\u00e9"


async def test_nothing_runs_on_after_the_end(start: Start) -> None:
    workers, [template] = await start(ON_REQUEST)
    pids = [workers._idle[0].pid]
    slow = asyncio.create_task(template.render(SLOW))
    await template.render(USER)
    pids.append(workers._idle[0].pid)
    await workers.close()
    await asyncio.gather(slow, return_exceptions=True)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_process_whose_answer_nobody_reads_is_ended_and_leaves_nothing_open(start: Start) -> None:
    def num_open() -> int:
        return sum(1 for _ in pathlib.Path("/proc/self/fd").iterdir())

    before = num_open()
    workers, _ = await start("{{ messages[0].content }}")
    worker = workers._idle[0]
    worker._stdin.write(pack_question(0, [{"role": "user", "content": "a" * 10**6}]))
    await worker._stdout.readexactly(HEADER.size)
    await asyncio.wait_for(workers.close(), 60)
    assert num_open() == before


async def test_the_process_gets_nothing_secret(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDBACK_SECRET", "x")
    workers, _ = await start("x")
    with open(f"/proc/{workers._idle[0].pid}/environ", "rb") as file:  # noqa: ASYNC230, PTH123
        assert b"HOLDBACK_SECRET" not in file.read()


async def test_a_source_that_is_no_template_is_refused_at_start(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"^model 1: the chat template cannot be read: "):
        await start("x", "{% for %}", "y")


@pytest.mark.parametrize(
    ("source", "timeout_s", "says"),
    [
        ("{{ 'x' * 900000000 }}", 60.0, "the chat template cannot be read: MemoryError"),
        ("{{ 3 ** (10 ** 9) }}", 2.0, "the chat template took longer than 2 s to compile"),
    ],
)
async def test_of_several_templates_the_one_that_cannot_be_compiled_is_named(
    start: Start, source: str, timeout_s: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_workers, "START_TIMEOUT_S", timeout_s)
    with pytest.raises(ConfigError, match=f"^model 1: {says}$"):
        await start("x", source, "y")


@pytest.mark.case("B72")
@pytest.mark.parametrize(
    "source", ["{{ 'a' * 3000000000 }}", "{{ 9**9**9 }}", "{% if 1 == 2 %}{{ 7**9**9 }}{% endif %}x"]
)
async def test_what_is_constant_in_a_template_is_worked_out_within_bounds(
    start: Start, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_workers, "START_TIMEOUT_S", 5.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = "rendered"
    try:
        _, [template] = await start(source, timeout_s=2.0)
        await template.render(USER)
    except (ConfigError, InvalidArgumentError) as error:
        outcome = error.message
    assert outcome == "rendered" or "model 0: the chat template" in outcome or "refused chat.messages" in outcome
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes, of this process


@pytest.mark.case("B56")
async def test_clients_that_leave_start_no_more_processes_than_there_may_be(start: Start) -> None:
    workers, [template] = await start(ON_REQUEST, timeout_s=6)
    left = [asyncio.create_task(template.render(SLOW)) for _ in range(8)]
    await asyncio.sleep(0.2)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert len(workers._turns.under_way) <= NUM_WORKERS
    assert await template.render(USER) == "h\u00e9"
    assert len(workers._turns.under_way) + len(workers._idle) <= NUM_WORKERS


async def test_more_text_than_may_wait_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(template_workers.TURN_LIMITS, num_places=1, max_chars=1099)
    monkeypatch.setattr(template_workers, "TURN_LIMITS", limits)
    _, [template] = await start("{{ messages[0].content }}")
    under_way = asyncio.create_task(template.render([{"role": "user", "content": "a" * 8}]))
    await asyncio.sleep(0)
    # Beside the text of both, 256 for each message and each conversation, whose template may write without end.
    expected = "524 characters wait to be rendered by a chat template and 777 would be added; allowed: 1099"
    with pytest.raises(ResourceExhaustedError, match=expected):
        await template.render([{"role": "", "content": ""}, {"role": "user", "content": "bbbbb"}])
    with pytest.raises(ResourceExhaustedError, match="allowed: 1099"):
        await template.render([{"role": "r" * 64, "content": ""}])
    assert await under_way == "a" * 8
    assert await template.render([{"role": "user", "content": "c" * 3000}]) == "c" * 3000


async def test_a_process_that_died_while_it_waited_fails_nobody(start: Start) -> None:
    workers, [template] = await start("{{ messages[0].content }}")
    (waiting,) = workers._idle
    os.kill(waiting.pid, signal.SIGKILL)
    await asyncio.wait_for(waiting._child.wait(), 60)
    assert await template.render(USER) == "h\u00e9"
    assert [worker.is_alive for worker in workers._idle] == [True]


async def test_a_process_that_cannot_be_started_is_a_fault_of_ours(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, [template] = await start("{{ messages[0].content }}")
    await workers._idle.pop().end()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InternalError, match="no process could be started for the chat template"):
        await template.render(USER)
    monkeypatch.undo()
    assert await template.render(USER) == "h\u00e9"

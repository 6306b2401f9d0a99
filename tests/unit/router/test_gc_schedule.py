"""When all objects of a router's process are looked through; each test has a process of its own for it."""

import subprocess
import sys
import textwrap

BEGINNING = """
    import asyncio, gc, psutil
    from ridgeline.router.gc_schedule import GcSchedule

    MIB = 1 << 20

    def looks():
        return gc.get_stats()[2]["collections"]

    class Cycle:
        alive = 0

        def __init__(self):
            self.me, self.payload = self, bytearray(MIB)
            Cycle.alive += 1

        def __del__(self):
            Cycle.alive -= 1

    def old_garbage():
        cycle = Cycle()
        gc.collect(0), gc.collect(1)  # it has grown old, and what drops it is not seen by young collections
"""


def printed(script):
    """What a process prints that runs the script after `BEGINNING`, its last words."""
    code = textwrap.dedent(BEGINNING) + textwrap.dedent(script)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split(), ran.stderr


def test_while_many_streams_run_no_number_of_new_objects_makes_python_look_through_them():
    words, _ = printed("""
        async def main():
            GcSchedule(lambda: 2000, look_every_s=0.001, pause_s=0.0, most_growth_bytes=1 << 40).start()
            before, kept = looks(), []
            for _ in range(40):
                kept.append([[] for _ in range(20_000)])
                await asyncio.sleep(0.002)
            print(looks() - before, gc.get_stats()[1]["collections"] > 20)

        asyncio.run(main())
    """)
    assert words == ["0", "True"]


def test_a_process_without_file_descriptors_still_looks_for_garbage():
    """Its memory cannot be read then, which ended the watch without a word."""
    words, _ = printed("""
        def fails(self):
            raise OSError(24, "Too many open files")

        async def main():
            running = 2000
            GcSchedule(lambda: running, look_every_s=0.001, pause_s=0.0).start()
            psutil.Process.memory_info = fails
            old_garbage()
            await asyncio.sleep(0.05)
            running = 0
            while Cycle.alive:
                await asyncio.sleep(0.001)
            print("gone")

        asyncio.run(main())
    """)
    assert words == ["gone"]


def test_garbage_goes_once_few_streams_run():
    words, said = printed("""
        async def main():
            running = 2000
            GcSchedule(lambda: running, look_every_s=0.001, pause_s=0.0).start()
            old_garbage()
            await asyncio.sleep(0.05)
            print(Cycle.alive)
            running = 100
            while Cycle.alive:
                await asyncio.sleep(0.001)
            print(looks() > 0)

        asyncio.run(main())
    """)
    assert (words, said) == (["1", "True"], "")


def test_an_idle_process_does_not_look_again_and_again():
    words, _ = printed("""
        async def main():
            GcSchedule(lambda: 0, look_every_s=0.001, pause_s=0.0).start()
            old_garbage()
            while Cycle.alive:
                await asyncio.sleep(0.001)
            before = looks()
            await asyncio.sleep(0.1)
            print(looks() - before)

        asyncio.run(main())
    """)
    assert words == ["0"]


def test_garbage_that_never_meets_a_quiet_moment_is_bounded_and_the_delay_is_told():
    words, said = printed("""
        async def main():
            GcSchedule(lambda: 2000, look_every_s=0.001, pause_s=0.0, most_growth_bytes=64 * MIB).start()
            me, most = psutil.Process(), 0
            from_bytes = me.memory_info().rss
            for _ in range(500):
                old_garbage()
                await asyncio.sleep(0.002)
                most = max(most, me.memory_info().rss - from_bytes)
            print(most < 100 * MIB, looks() < 25)

        asyncio.run(main())
    """)
    assert words == ["True", "True"]
    assert "2000 streams stood still for 0.0 s: the router had grown by 64 MiB" in said


def test_after_it_python_looks_by_itself_again():
    words, _ = printed("""
        async def main():
            thresholds = gc.get_threshold()
            watch = GcSchedule(lambda: 2000)
            watch.start()
            print(gc.get_threshold() == thresholds, gc.get_freeze_count() > 0)
            watch.stop()
            print(gc.get_threshold() == thresholds, gc.get_freeze_count() > 0)

        asyncio.run(main())
    """)
    assert words == ["False", "True", "True", "False"]

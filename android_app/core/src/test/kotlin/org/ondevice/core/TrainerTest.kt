package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertFalse
import org.junit.jupiter.api.Assertions.assertInstanceOf
import org.junit.jupiter.api.Assertions.assertNotNull
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.EnumSource
import java.io.File
import java.util.concurrent.TimeUnit
import kotlin.math.abs

/** Training through the real program. */
class TrainerTest {
    private fun bits(values: FloatArray) = IntArray(values.size) { values[it].toRawBits() }

    /** Adapter, optimizer's vectors, seed and counters, bit for bit. */
    private fun assertSameState(expected: Map<String, StoredTensor>, received: Map<String, StoredTensor>) {
        assertEquals(expected.keys, received.keys)
        for ((name, tensor) in expected) {
            tensor.floats?.let { assertArrayEquals(bits(it), bits(received.getValue(name).floats!!), name) }
            tensor.longs?.let { assertArrayEquals(it, received.getValue(name).longs, name) }
        }
    }

    /** Losses, projected gradients, evaluations, adapter and checkpoint of `ondevice run` on the same artifact and data, bit for bit. */
    @ParameterizedTest
    @EnumSource
    fun sameRunAsPython(exported: Exported) {
        val folder = Fixtures.scratch()
        val program = exported.program
        val session = exported.session()
        val trainer = Runs.trainer(session, folder, evaluate = true)
        trainer.run()
        val finished = assertInstanceOf(TrainerState.Finished::class.java, trainer.state, trainer.state.toString()).result
        val ours = EventLog.read(File(folder, "events.jsonl")).entries
        val theirs = EventLog.read(exported.file("events.jsonl")).entries
        for (kind in listOf("step", "evaluate")) {
            val (mine, known) = listOf(ours, theirs).map { all -> all.filter { it.kind == kind && (kind == "step" || it.step != 0) } }
            assertEquals(known.size, mine.size, kind)
            for ((left, right) in mine.zip(known)) {
                for (field in listOf("step", "loss", "losses", "projected_gradients", "learning_rate", "tokens", "accuracy", "majority_share", "rows", "best")) {
                    assertEquals(numbers(right.values[field]), numbers(left.values[field]), "$kind ${right.step}: $field")
                }
            }
        }
        val missing = theirs.groupBy { it.kind }.mapNotNull { (kind, found) ->
            (found.last().values.keys - ours.last { it.kind == kind }.values.keys).takeIf { it.isNotEmpty() }?.let { "$kind: $it" }
        }
        assertEquals(emptyList<String>(), missing, "fields that Python's events have")
        val ends = listOf(ours, theirs).map { it.last { entry -> entry.kind == "finish" } }
        assertEquals(ends[1].number("first_loss"), ends[0].number("first_loss"))
        assertEquals(ends[1].number("final_loss")!!, ends[0].number("final_loss")!!, 1e-12)
        val (adapter, known) = listOf(File(folder, "adapter"), exported.file("adapter")).map { Safetensors.read(File(it, "adapter_model.safetensors")) }
        assertEquals(known.tensors.keys, adapter.tensors.keys)
        for ((name, tensor) in known.tensors) {
            assertEquals(tensor.shape, adapter.tensors.getValue(name).shape, name)
            assertArrayEquals(bits(tensor.floats!!), bits(adapter.tensors.getValue(name).floats!!), name)
        }
        assertEquals(known.metadata, adapter.metadata)
        assertEquals(exported.file("adapter/adapter_config.json").readText(), File(folder, "adapter/adapter_config.json").readText())
        val states = listOf(exported.file("checkpoint-00000012"), File(folder, "checkpoint-00000012")).map { Safetensors.read(File(it, "state.safetensors")).tensors }
        assertSameState(states[0], states[1])
        assertNotNull(finished.before)
        assertTrue(finished.evaluation!!.rows == 15 && !finished.interrupted)
        val called = if (exported == Exported.BLOCKS) listOf("block_backward_2x64", "block_backward_2x32", "head_gradient", "block_forward_3x64")
        else listOf("train_step", "train_step_32", "evaluate")
        assertTrue(program.calls.containsAll(called), program.calls.toString())
    }

    private fun numbers(value: Any?): Any? = when (value) {
        is List<*> -> value.map { numbers(it) }
        is Number -> value.toFloat()
        else -> value
    }

    @ParameterizedTest
    @EnumSource
    fun resumedRunHasTheBitsOfAnUninterruptedOne(exported: Exported) {
        val whole = Runs.train(Fixtures.scratch(), exported = exported)
        val folder = Fixtures.scratch()
        lateinit var trainer: Trainer
        trainer = Runs.trainer(exported.session(), folder, listener = object : TrainerListener {
            override fun onEvent(event: Event) {
                if (event is Event.Step && event.step == 6) trainer.stop()
            }
        })
        trainer.start()
        assertTrue(trainer.await(120_000))
        assertTrue((trainer.state as TrainerState.Finished).result.let { it.interrupted && it.steps == 7 })
        val resumed = Runs.train(folder, mode = StartMode.RESUME, exported = exported)
        assertSameState(whole.state(), resumed.state())
        val kinds = EventLog.read(File(folder, "events.jsonl")).entries.map { it.kind to it.step }
        assertEquals((0 until 12).toList(), kinds.filter { it.first == "step" }.map { it.second })
        assertTrue(("interrupt" to 7) in kinds && ("resume" to 7) in kinds && kinds.last().first == "finish")
    }

    /** The process dies without a word; what it saved last goes on to the same bits. */
    @ParameterizedTest
    @EnumSource
    fun killedProcessResumesWithTheSameBits(exported: Exported) {
        val whole = Runs.train(Fixtures.scratch(), exported = exported)
        val folder = Fixtures.scratch()
        val child = ChildMain.start(folder, 12, exported, last = 8)
        val lines = child.inputStream.bufferedReader()
        val seen = generateSequence { lines.readLine() }.firstOrNull { "\"event\":\"step\"" in it && "\"step\":8," in it }
        if (seen == null) throw AssertionError("the child ended early: " + child.errorStream.bufferedReader().readText())
        child.destroyForcibly()
        assertTrue(child.waitFor(120, TimeUnit.SECONDS))
        File(folder, "events.jsonl").appendText("{\"event\":\"step\",\"step\":9,\"lo") // a truncated line, as a power cut leaves it
        File(folder, ".checkpoint-00000010.partial-abcd1234").mkdirs()
        val resumed = Runs.train(folder, mode = StartMode.RESUME, exported = exported)
        assertSameState(whole.state(), resumed.state())
        val log = EventLog.read(File(folder, "events.jsonl")).entries
        assertEquals(5, log.first { it.kind == "resume" }.step)
        assertEquals((0 until 12).toList(), log.filter { it.kind == "step" }.map { it.step })
        assertFalse(folder.list()!!.any { ".partial-" in it })
    }

    /** The kernel refuses to write the next checkpoint (files may have 8 KiB): a clear error, and the last one is whole. */
    @Test
    fun fullDiskKeepsTheLastCheckpoint() {
        val folder = Fixtures.scratch()
        Runs.train(folder, Runs.settings.copy(steps = 5))
        val before = File(folder, "checkpoint-00000005/state.safetensors").readBytes()
        val child = ChildMain.start(folder, 12, before = "trap '' XFSZ; ulimit -f 8;")
        child.inputStream.readBytes()
        val words = child.errorStream.bufferedReader().readText()
        assertEquals(ErrorKind.STORAGE.exitCode, child.waitFor(), words)
        assertTrue("cannot write" in words && "free some storage" in words, words)
        assertArrayEquals(before, File(folder, "checkpoint-00000005/state.safetensors").readBytes())
        val whole = Runs.train(Fixtures.scratch())
        assertArrayEquals(bits(whole.adapter), bits(Runs.train(folder, mode = StartMode.RESUME).adapter))
    }

    @Test
    fun damagedCheckpointFallsBackToTheOneBefore() {
        val folder = Fixtures.scratch()
        Runs.train(folder, Runs.settings.copy(steps = 10))
        val state = File(folder, "checkpoint-00000010/state.safetensors")
        state.writeBytes(state.readBytes().also { it[it.size - 5] = (it[it.size - 5] + 1).toByte() }) // one bit of one weight
        val events = ArrayList<Event>()
        val resumed = Runs.train(folder, mode = StartMode.RESUME, listener = object : TrainerListener {
            override fun onEvent(event: Event) {
                events.add(event)
            }
        })
        assertTrue(events.filterIsInstance<Event.Warning>().any { "damaged" in it.message }, events.toString())
        assertEquals(5, events.filterIsInstance<Event.Resume>().single().step)
        assertArrayEquals(bits(Runs.train(Fixtures.scratch()).adapter), bits(resumed.adapter))
        for (path in folder.listFiles { file -> file.name.startsWith("checkpoint-") }!!) File(path, "meta.json").writeText("{")
        val error = assertThrows(OndeviceException::class.java) { Runs.train(folder, mode = StartMode.RESUME) }
        assertEquals(ErrorKind.CHECKPOINT, error.kind)
        assertTrue("whole" in error.message!!)
    }

    @Test
    fun aStateThatIsNotThisProgramsIsRefused() {
        val session = Exported.BLOCKS.session()
        val state = session.state()
        assertTrue(state.size > 4 && state.values.any { it.longs != null }, "${state.keys}")
        fun refused(words: String, stored: Map<String, StoredTensor>) {
            val error = assertThrows(OndeviceException::class.java) { session.load(stored) }
            assertTrue(error.kind == ErrorKind.CHECKPOINT && words in error.message!!, error.message)
        }
        for ((name, tensor) in state) {
            refused(name, state - name)
            refused(name, state + (name to StoredTensor(tensor.shape + 1, tensor.floats ?: FloatArray(1))))
        }
        refused("adapter", Exported.ZEROTH_ORDER.session().state())
        assertSameState(state, session.state())
    }

    @Test
    fun foreignRunIsRefusedByWhatDiffers() {
        val folder = Fixtures.scratch()
        Runs.train(folder, Runs.settings.copy(steps = 5))
        val other = assertThrows(OndeviceException::class.java) { Runs.train(folder, Runs.settings.copy(learningRate = 0.02), StartMode.RESUME) }
        assertTrue(other.kind == ErrorKind.CHECKPOINT && "learning_rate" in other.message!! && "0.02" in other.message!!, other.message)
        val again = assertThrows(OndeviceException::class.java) { Runs.train(folder) }
        assertTrue("already holds a run" in again.message!!)
        Runs.train(folder, Runs.settings.copy(steps = 5, learningRate = 0.02), StartMode.OVERWRITE)
        assertEquals(1, EventLog.read(File(folder, "events.jsonl")).entries.count { it.kind == "start" })
    }

    @Test
    fun pausesForHeatAndGoesOnToTheSameBits() {
        val folder = Fixtures.scratch()
        val states = ArrayList<TrainerState>()
        val before = Runs.program.unloads
        val statuses = ArrayDeque(listOf(0, 0, 0, 3, 3, 2, 2, 1))
        val program = Runs.program
        val session = Exported.ZEROTH_ORDER.session()
        val trainer = Runs.trainer(session, folder, health = { Health(thermalStatus = if (statuses.size > 1) statuses.removeFirst() else statuses.first()) }, listener = object : TrainerListener {
            override fun onState(state: TrainerState) {
                states.add(state)
            }
        })
        trainer.start()
        assertTrue(trainer.await(120_000))
        val paused = states.filterIsInstance<TrainerState.Paused>()
        assertEquals(listOf(3), paused.map { it.step }.distinct())
        assertEquals(setOf(PauseCause.HEAT), paused.first().reasons.map { it.cause }.toSet())
        assertTrue(File(folder, "checkpoint-00000003").isDirectory || File(folder, "checkpoint-00000012").isDirectory)
        assertEquals(before + 1, program.unloads)
        assertArrayEquals(bits(Runs.train(Fixtures.scratch()).adapter), bits(session.adapter))
        val messages = EventLog.read(File(folder, "events.jsonl")).entries.filter { it.kind == "warning" }.map { it.values["message"] as String }
        assertTrue("hot" in messages.first() && messages.last() == "goes on", messages.toString())
    }

    @Test
    fun pauseResumeAndStopFromOtherThreads() {
        val folder = Fixtures.scratch()
        val program = Runs.program
        val session = Exported.ZEROTH_ORDER.session()
        lateinit var trainer: Trainer
        trainer = Runs.trainer(session, folder, listener = object : TrainerListener {
            override fun onEvent(event: Event) {
                if (event is Event.Step && event.step == 1) trainer.pause()
            }
        })
        assertEquals(TrainerState.Idle, trainer.state)
        trainer.start()
        waitFor { trainer.state is TrainerState.Paused }
        assertEquals(setOf(PauseCause.USER), (trainer.state as TrainerState.Paused).reasons.map { it.cause }.toSet())
        assertTrue(File(folder, "checkpoint-00000002/meta.json").isFile)
        Thread.sleep(100)
        assertTrue(trainer.state is TrainerState.Paused)
        val busy = Runs.trainer(session, folder)
        busy.run()
        assertEquals(ErrorKind.BUSY, (busy.state as TrainerState.Failed).error.kind)
        trainer.resume()
        waitFor { (trainer.state as? TrainerState.Running)?.step ?: 0 >= 3 || trainer.state is TrainerState.Finished }
        trainer.pause()
        waitFor { trainer.state is TrainerState.Paused || trainer.state is TrainerState.Finished }
        trainer.stop()
        assertTrue(trainer.await(120_000))
        assertInstanceOf(TrainerState.Finished::class.java, trainer.state)
        assertThrows(IllegalStateException::class.java) { trainer.start() }
    }

    @ParameterizedTest
    @EnumSource
    fun lossThatIsNoNumberStopsWithoutSaving(exported: Exported) {
        val folder = Fixtures.scratch()
        val session = exported.session()
        val trainer = Runs.trainer(session, folder, Runs.settings.copy(learningRate = 1e38, checkpointEvery = 1))
        trainer.run()
        val failed = assertInstanceOf(TrainerState.Failed::class.java, trainer.state, trainer.state.toString())
        assertEquals(ErrorKind.TRAINING, failed.error.kind)
        assertTrue("learning rate" in failed.error.message!!, failed.error.message)
        val log = EventLog.read(File(folder, "events.jsonl")).entries
        assertEquals("error", log.last().kind)
        for (path in folder.listFiles { file -> file.name.startsWith("checkpoint-") }!!) {
            assertTrue(Safetensors.read(File(path, "state.safetensors")).tensors.getValue("adapter").floats!!.all { it.isFinite() }, path.name)
        }
    }

    @Test
    fun aProjectedGradientThatIsNoNumberStopsTheRun() {
        val step = Exported.ZEROTH_ORDER.manifest.spec.methods.getValue("train_step").inputs.indexOfFirst { it.role == Role.COUNTER }
        val odd = object : Program by Runs.program {
            override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> {
                val outputs = Runs.program.execute(method, inputs, layer)
                return if (inputs[step].longs()[0] < 2) outputs else listOf(outputs[0], Tensor.of(FloatArray(4) { Float.NaN }, 4), outputs[2])
            }
        }
        val folder = Fixtures.scratch()
        val trainer = Runs.trainer(Exported.ZEROTH_ORDER.session(odd), folder)
        trainer.run()
        val failed = trainer.state as TrainerState.Failed
        assertTrue(failed.step == 2 && "projected gradient of step 2 is NaN" in failed.error.message!!, failed.error.message)
        assertFalse(folder.list()!!.any { it.startsWith("checkpoint-") || it.startsWith("adapter") })
    }

    @Test
    fun aProgramThatFailsIsToldInItsOwnWords() {
        val folder = Fixtures.scratch()
        val broken = object : Program {
            override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> = throw IllegalStateException("error 0x12")

            override fun close() {}
        }
        val trainer = Runs.trainer(Exported.ZEROTH_ORDER.session(broken), folder)
        trainer.run()
        val failed = trainer.state as TrainerState.Failed
        assertTrue("0x12" in failed.error.message!!)
    }

    @Test
    fun etaAndSpeedAreMeasured() {
        val events = ArrayList<Event.Step>()
        val started = System.nanoTime()
        Runs.train(Fixtures.scratch(), listener = object : TrainerListener {
            override fun onEvent(event: Event) {
                if (event is Event.Step) events.add(event)
            }
        })
        val seconds = (System.nanoTime() - started) / 1e9
        assertTrue(events.sumOf { it.stepTimeS } < seconds)
        assertEquals(0.0, events.last().etaS)
        for (event in events) {
            assertTrue(abs(event.tokensPerS * event.stepTimeS - event.tokens) < 1e-6 && event.tokens in setOf(64, 128))
            assertTrue(event.peakMemoryBytes > 10 shl 20 && event.stepsPerS > 0)
        }
        assertTrue(events.first().etaS > 0)
    }

    /** Of several evaluations the best keeps its checkpoint and becomes `adapter-best`. */
    @Test
    fun bestEvaluationIsKept() {
        val folder = Fixtures.scratch()
        val session = Exported.ZEROTH_ORDER.session()
        Runs.trainer(session, folder, Runs.settings.copy(evalEvery = 1, learningRate = 0.3, steps = 8), evaluate = true).run()
        val evaluations = EventLog.read(File(folder, "events.jsonl")).entries.filter { it.kind == "evaluate" && it.step != 0 }
        val score = { entry: LogContent.Entry -> listOf(entry.number("accuracy")!!, -entry.number("loss")!!) }
        val best = evaluations.reduce { left, right -> if (Checkpoints.compareScores(score(right), score(left)) > 0) right else left }
        assertTrue(best.step != 8, "the fixture's best is not the last: ${best.step}")
        assertEquals(best.step, evaluations.last { it.values["best"] == true }.step)
        assertEquals(true, evaluations.first().values["best"])
        val names = folder.list()!!.filter { it.startsWith("checkpoint-") }.map { it.takeLast(1).toInt() }.sorted()
        assertTrue(names.size == 3 && best.step in names && 8 in names, "the two newest and the best: $names")
        val kept = Safetensors.read(File(folder, "checkpoint-0000000${best.step}/state.safetensors")).tensors.getValue("adapter").floats!!
        assertArrayEquals(bits(kept), bits(PeftAdapter(Exported.ZEROTH_ORDER.artifact).read(File(folder, "adapter-best"))))
        assertArrayEquals(bits(session.adapter), bits(PeftAdapter(Exported.ZEROTH_ORDER.artifact).read(File(folder, "adapter"))))
    }

    /** A session that has trained starts from the first values again, unless the run names the adapter it starts from. */
    @ParameterizedTest
    @EnumSource
    fun aRunStartsAfreshOrFromTheAdapterItNames(exported: Exported) {
        val first = Runs.train(Fixtures.scratch(), Runs.settings.copy(steps = 3), exported = exported)
        val fresh = first.adapter
        val used = exported.session().also { it.restart(fresh) }
        Runs.trainer(used, Fixtures.scratch(), Runs.settings.copy(steps = 3)).run()
        assertSameState(first.state(), used.state())
        val data = Runs.data(exported.manifest)
        val from = TrainData(data.batches, data.sha256, data.name, "a".repeat(64))
        val folder = Fixtures.scratch()
        Trainer(used, from, Runs.settings.copy(steps = 3), folder, StartMode.NEW, ProcessMeter).run()
        assertFalse(used.adapter.contentEquals(fresh))
        val other = exported.session().also { it.restart(fresh) } // the optimizer begins anew, whatever the session has done
        Trainer(other, from, Runs.settings.copy(steps = 3), Fixtures.scratch(), StartMode.NEW, ProcessMeter).run()
        assertSameState(other.state(), used.state())
        val error = assertThrows(OndeviceException::class.java) { Runs.train(folder, mode = StartMode.RESUME, exported = exported) }
        assertTrue("adapter = " in error.message!!, error.message)
    }

    @Test
    fun anEvaluationCanBePausedToo() {
        val states = ArrayList<TrainerState>()
        val statuses = ArrayDeque(listOf(0, 4, 4, 0))
        val trainer = Runs.trainer(
            Exported.ZEROTH_ORDER.session(), Fixtures.scratch(), Runs.settings.copy(steps = 1), evaluate = true,
            health = { Health(thermalStatus = if (statuses.size > 1) statuses.removeFirst() else 0) },
            listener = object : TrainerListener {
                override fun onState(state: TrainerState) {
                    states.add(state)
                }
            },
        )
        trainer.run()
        val place = states.indexOfFirst { it is TrainerState.Paused }
        assertEquals(TrainerState.Running(0, 1, "evaluating"), states[place - 1])
        assertEquals(TrainerState.Running(0, 1, "evaluating"), states[place + 1])
        assertEquals(15, (trainer.state as TrainerState.Finished).result.before!!.rows)
    }

    /** The phone's log is read by the same tools: `ondevice replay` rebuilds the adapter from its scalars alone. */
    @Test
    fun pythonReplaysTheLog() {
        val folder = Fixtures.scratch()
        Runs.train(folder)
        val out = File(Fixtures.scratch(), "replayed")
        val replay = ProcessBuilder(Fixtures.python, "-m", "ondevice", "replay", folder.path, "--artifact", Fixtures.artifact.path, "--out", out.path)
            .directory(Fixtures.root).redirectErrorStream(true).start()
        val words = replay.inputStream.readBytes().toString(Charsets.UTF_8)
        assertEquals(0, replay.waitFor(), words)
        val (known, received) = listOf(File(folder, "adapter"), out).map { PeftAdapter(Exported.ZEROTH_ORDER.artifact).read(it) }
        for (index in known.indices) assertEquals(known[index], received[index], 1e-6f)
        assertTrue(known.any { it != 0f })
    }

    private fun waitFor(condition: () -> Boolean) {
        val end = System.nanoTime() + 60_000_000_000
        while (!condition()) {
            if (System.nanoTime() > end) throw AssertionError("waited for a minute")
            Thread.sleep(5)
        }
    }
}

package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertInstanceOf
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import java.io.File
import kotlin.math.abs

/** Training on answers that the user judged, through the real program. */
class JudgedTest {
    private val artifact by lazy { Artifact.open(File(Fixtures.folder, "writer")) }
    private val manifest get() = artifact.manifest

    private fun rated(name: String): RatedAnswers {
        val rows = RowReader.read(File(Fixtures.folder, "judged $name.jsonl"))
        assertEquals(Format.THUMBS, rows.format)
        val items = Encoder(Runs.tokenizer, manifest.longestTokens).encode(rows).items
        return RatedAnswers(items, manifest.longestTokens, Runs.tokenizer.padId)
    }

    private fun trainer(session: Session, folder: File, settings: TrainSettings = SETTINGS, mode: StartMode = StartMode.NEW, listener: TrainerListener = object : TrainerListener {}): Trainer {
        val parts = listOf(rated("train"), rated("valid"))
        val batches = Batches(parts[0].items.map { it.example }, manifest.batchSize, manifest.lengthsTokens, session.seed, Runs.tokenizer.padId)
        val data = TrainData(batches, "0", "judged", rated = parts)
        return Trainer(session, data, settings, folder, mode, ProcessMeter, evaluator = parts[1].judge(), listener = listener)
    }

    private fun run(folder: File, settings: TrainSettings = SETTINGS, mode: StartMode = StartMode.NEW): Session {
        val session = Session(artifact, program)
        val trainer = trainer(session, folder, settings, mode)
        trainer.run()
        assertInstanceOf(TrainerState.Finished::class.java, trainer.state, trainer.state.toString())
        return session
    }

    private fun same(expected: Map<String, StoredTensor>, received: Map<String, StoredTensor>) {
        assertEquals(expected.keys, received.keys)
        for ((name, tensor) in expected) {
            tensor.floats?.let { known -> assertArrayEquals(bits(known), bits(received.getValue(name).floats!!), name) }
            tensor.longs?.let { known -> assertArrayEquals(known, received.getValue(name).longs, name) }
        }
    }

    private fun bits(values: FloatArray) = IntArray(values.size) { values[it].toRawBits() }

    /** Losses and figures as float32, likelihoods before training, checkpoint and adapter bit for bit. */
    @Test
    fun sameRunAsPython() {
        val folder = Fixtures.scratch()
        run(folder)
        val python = File(Fixtures.folder, "judged run")
        val (ours, theirs) = listOf(folder, python).map { EventLog.read(File(it, "events.jsonl")).entries }
        for (kind in listOf("step", "evaluate")) {
            val (mine, known) = listOf(ours, theirs).map { all -> all.filter { it.kind == kind && (kind == "step" || it.step != 0) } }
            assertEquals(known.size, mine.size, kind)
            for ((left, right) in mine.zip(known)) {
                for (field in listOf("step", "loss", "losses", "learning_rate", "tokens", "accuracy", "rows", "best", "preferences")) {
                    assertEquals(numbers(right.values[field]), numbers(left.values[field]), "$kind ${right.step}: $field")
                }
            }
        }
        assertTrue(ours.filter { it.kind == "step" }.any { (it.values["preferences"] as Map<*, *>)["kl"] != 0.0 })
        val (mine, known) = listOf(folder, python).map { (Json.parse(File(it, RatedAnswers.FILE_NAME).readText()) as Map<*, *>)["log_likelihoods"] }
        assertEquals(numbers(known), numbers(mine))
        val states = listOf(python, folder).map { Safetensors.read(File(it, "checkpoint-00000009/state.safetensors")).tensors }
        same(states[0], states[1])
        val adapters = listOf(python, folder).map { Safetensors.read(File(it, "adapter/adapter_model.safetensors")).tensors }
        same(adapters[0], adapters[1])
        val identity = EventLog.read(File(folder, "events.jsonl")).start!!.values["identity"] as Map<*, *>
        assertEquals(listOf("kto", 0.1), listOf(identity["objective"], identity["beta"]))
    }

    private fun numbers(value: Any?): Any? = when (value) {
        is List<*> -> value.map { numbers(it) }
        is Map<*, *> -> value.entries.associate { it.key to numbers(it.value) }
        is Number -> value.toFloat()
        else -> value
    }

    @Test
    fun aStoppedRunGoesOnWithTheSameBitsAndOtherRowsAreSeen() {
        val whole = run(Fixtures.scratch())
        val folder = Fixtures.scratch()
        run(folder, SETTINGS.copy(steps = 5))
        val file = File(folder, RatedAnswers.FILE_NAME)
        val reference = file.readText()
        same(whole.state(), run(folder, mode = StartMode.RESUME).state())
        assertEquals(reference, file.readText())
        val log = EventLog.read(File(folder, "events.jsonl")).entries
        assertEquals((0 until 9).toList(), log.filter { it.kind == "step" }.map { it.step })
        val stored = Json.parse(reference) as Map<*, *>
        file.writeText(Json.write(stored.entries.associate { it.key.toString() to it.value } + ("rows" to "0")))
        val trainer = trainer(Session(artifact, program), folder, SETTINGS.copy(steps = 11), StartMode.RESUME)
        trainer.run()
        val failed = assertInstanceOf(TrainerState.Failed::class.java, trainer.state, trainer.state.toString())
        assertTrue(failed.error.kind == ErrorKind.CHECKPOINT && "of another rows" in failed.error.message!!, failed.error.message)
    }

    @Test
    fun theObjectiveIsPythons() {
        val cases = Fixtures.json("kto.json") as List<*>
        assertTrue(cases.size >= 8)
        for (case in cases.map { it as Map<*, *> }) {
            val (answers, others) = (case["ratios"] as List<*>).map { doubles(it) }
            val liked = (case["liked"] as List<*>).map { it as Boolean }.toBooleanArray()
            val graded = Kto(case["beta"] as Double, 1.5, 0.75).grade(answers, others, liked)
            close(case["loss"] as Double, graded.loss)
            doubles(case["coefficients"]).zip(graded.coefficients.toList()).forEach { (known, mine) -> close(known, mine) }
            val figures = case["figures"] as Map<*, *>
            assertEquals(figures.keys, graded.figures.keys)
            for ((name, known) in figures) close((known as Number).toDouble(), graded.figures.getValue(name as String))
            assertEquals((case["right"] as List<*>), graded.right.toList())
        }
    }

    private fun doubles(values: Any?) = (values as List<*>).map { (it as Number).toDouble() }.toDoubleArray()

    /** Equal but for the last bits of a hyperbolic tangent. */
    private fun close(known: Double, mine: Double) = assertTrue(abs(known - mine) <= 1e-13 * maxOf(1.0, abs(known)), "$known $mine")

    @Test
    fun whatCannotBeLearnedFromIsSaid() {
        val rows = rated("train").items.filter { it.liked == true }
        val error = assertThrows(OndeviceException::class.java) { RatedAnswers(rows, 64, 0).check() }
        assertTrue(error.kind == ErrorKind.DATA && "all rated up" in error.message!!, error.message)
        val whole = Exported.ZEROTH_ORDER.session()
        val batch = Runs.data(whole.manifest).batches.at(0)
        val refused = assertThrows(OndeviceException::class.java) { whole.step(batch, 0L, 0.01) { Weighed(0.0, DoubleArray(it.size)) } }
        assertTrue("--method mesp" in refused.message!!, refused.message)
        val odd = RowReader.read("judged.jsonl", """{"prompt": "a", "answer": "b", "liked": "yes"}""".toByteArray(), allowEmpty = true)
        assertEquals("liked", odd.problems.single().field)
    }

    private companion object {
        val SETTINGS = TrainSettings(steps = 9, learningRate = 0.01, checkpointEvery = 4, evalEvery = 4)
        val program by lazy { PipeProgram(File(Fixtures.folder, "writer"), Fixtures.python, Fixtures.root) }
    }
}

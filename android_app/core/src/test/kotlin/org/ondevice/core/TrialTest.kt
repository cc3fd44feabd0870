package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertFalse
import org.junit.jupiter.api.Assertions.assertNotEquals
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import java.io.File
import kotlin.math.abs
import kotlin.random.Random

class TrialTest {
    private val manifest = ManifestReader.read(Fixtures.artifact)

    /** Scores of the labels are those that the real program's evaluation gives for the same row. */
    @Test
    fun judgesTheTasksLabelsBeforeAndAfter() {
        val trained = PeftAdapter(manifest).read(File(Fixtures.folder, "run/adapter"))
        val program = Runs.program
        val session = Session(manifest, program)
        val trial = Trial(session, Runs.tokenizer)
        val (prompt, answers) = trial.ofTask(mapOf("sentence" to "A warm film. "))!!
        assertEquals("A warm film. It was" to listOf(" terrible", " great"), prompt to answers)
        val result = trial.judge(prompt, answers, trained)
        val rows = RowReader.read("x", """{"task": "sst2", "prompt_fields": {"sentence": "A warm film."}, "label": 1}""".toByteArray())
        val items = Encoder(Runs.tokenizer, 64).encode(rows).items
        for ((side, flat) in listOf(result.before to FloatArray(manifest.adapterSize), result.after to trained)) {
            val scores = Evaluator(items, Runs.tokenizer.padId).run(session, flat)!!.predictions[0].scores
            assertEquals(scores.max(), side.ranked[0].meanLogLikelihood)
            assertEquals(scores.sorted(), side.ranked.map { it.meanLogLikelihood }.sorted())
            assertEquals(setOf("terrible", "great"), side.ranked.map { it.answer }.toSet())
            assertTrue(abs(side.ranked.sumOf { it.share } - 1) < 1e-12)
        }
        assertNotEquals(result.before.ranked.map { it.meanLogLikelihood }, result.after.ranked.map { it.meanLogLikelihood })
        assertThrows(OndeviceException::class.java) { trial.judge("x", emptyList(), trained) }
        val silent = Trial(Session(manifest.copy(methods = manifest.methods - Session.NEXT_TOKEN), program), Runs.tokenizer)
        assertFalse(silent.canGenerate)
        assertThrows(OndeviceException::class.java) { silent.generate("x", trained) }
    }

    /** The real program writes what Python writes with it, token by token. */
    @Test
    fun writesWhatPythonWrites() {
        val trained = PeftAdapter(manifest).read(File(Fixtures.folder, "run/adapter"))
        val trial = Trial(Session(manifest, Runs.program), Runs.tokenizer)
        assertTrue(trial.canGenerate)
        val expected = Fixtures.json("answers.json") as Map<*, *>
        val result = trial.generate(expected["prompt"] as String, trained, maxTokens = (expected["tokens"] as Long).toInt())
        assertEquals(expected["before"] to expected["after"], result.before.text to result.after.text)
    }

    /** With a program that can write; its next token is one more than the last one's id, its end is token 257. */
    @Test
    fun writesWithNextToken() {
        val columns = 8
        val method = ProgramMethod(
            listOf(Port("ids", DType.INT64, listOf(1, columns), ""), Port("length", DType.INT64, listOf(1), ""), Port("adapter", DType.FLOAT32, listOf(manifest.adapterSize), "")),
            listOf(Port("logits", DType.FLOAT32, listOf(260), "")), 0, emptyList(), 0, 0,
        )
        val counting = object : Program {
            override fun execute(method: String, inputs: List<Tensor>): List<Tensor> {
                val length = inputs[1].longs()[0].toInt()
                val last = inputs[0].longs()[length - 1].toInt()
                assertTrue(inputs[0].longs().drop(length).all { it == 256L })
                val end = if (inputs[2].floats().all { it == 0f }) 'e' else 'h'
                val next = if (last >= end.code) 257 else last + 1
                return listOf(Tensor.of(FloatArray(260) { if (it == next) 5f else 0f }, 260))
            }

            override fun close() {}
        }
        val session = Session(manifest.copy(methods = manifest.methods + (Session.NEXT_TOKEN to method)), counting)
        val trial = Trial(session, Runs.tokenizer)
        val result = trial.generate("0123456789a", FloatArray(manifest.adapterSize) { 1f })
        assertEquals("bcde" to "bcdefgh", result.before.text to result.after.text)
        assertEquals("bc", trial.generate("a", FloatArray(manifest.adapterSize), maxTokens = 2).before.text)
    }

    @Test
    fun temperatureDrawsByProbability() {
        val logits = floatArrayOf(0f, 1f, 2f, Float.NaN)
        assertEquals(2, Trial.pick(logits, 0f, Random(0)))
        val random = Random(0)
        val counts = IntArray(4)
        repeat(30_000) { counts[Trial.pick(logits, 1f, random)]++ }
        val expected = listOf(0.0900, 0.2447, 0.6652, 0.0)
        for (index in 0..3) assertTrue(abs(counts[index] / 30_000.0 - expected[index]) < 0.01, counts.toList().toString())
    }
}

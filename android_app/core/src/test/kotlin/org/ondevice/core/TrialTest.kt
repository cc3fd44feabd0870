package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertFalse
import org.junit.jupiter.api.Assertions.assertNotEquals
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.EnumSource
import kotlin.math.abs
import kotlin.random.Random

class TrialTest {
    /** Scores of the labels are those that the real program's evaluation gives for the same row. */
    @ParameterizedTest
    @EnumSource
    fun judgesTheTasksLabelsBeforeAndAfter(exported: Exported) {
        val trained = PeftAdapter(exported.artifact).read(exported.file("adapter"))
        val session = exported.session()
        val spec = exported.manifest.spec
        val untrained = exported.artifact.first(spec.adapter).floats()
        val trial = Trial(session, Runs.tokenizer)
        val task = TaskRecord.of(Tasks.find(exported.manifest.task!!))
        assertEquals(listOf("terrible", "great"), task.answers)
        val result = trial.classify(task, mapOf("sentence" to "A warm film. "), trained)
        val rows = RowReader.read("x", """{"task": "sst2", "prompt_fields": {"sentence": "A warm film."}, "label": 1}""".toByteArray())
        val items = Encoder(Runs.tokenizer, 64).encode(rows).items
        for ((side, flat) in listOf(result.before to untrained, result.after!! to trained)) {
            val scores = Evaluator(items, Runs.tokenizer.padId).run(session, flat)!!.predictions[0].scores
            assertEquals(scores.max(), side.ranked[0].meanLogLikelihood)
            assertEquals(scores.sorted(), side.ranked.map { it.meanLogLikelihood }.sorted())
            assertEquals(setOf("terrible", "great"), side.ranked.map { it.answer }.toSet())
            assertTrue(abs(side.ranked.sumOf { it.share } - 1) < 1e-12)
        }
        assertNotEquals(result.before.ranked.map { it.meanLogLikelihood }, result.after!!.ranked.map { it.meanLogLikelihood })
        assertThrows(OndeviceException::class.java) { trial.judge("x", emptyList(), trained) }
        val silent = Trial(Session(changed(exported, spec.methods - setOf(WholeSteps.NEXT_TOKEN, BlockSteps.HEAD_LOGITS)), exported.program), Runs.tokenizer)
        assertFalse(silent.canGenerate)
        assertThrows(OndeviceException::class.java) { silent.generate("x", trained) }
    }

    /** The real program writes what Python writes with it, token by token. */
    @ParameterizedTest
    @EnumSource
    fun writesWhatPythonWrites(exported: Exported) {
        val trained = PeftAdapter(exported.artifact).read(exported.file("adapter"))
        val trial = Trial(exported.session(), Runs.tokenizer)
        assertTrue(trial.canGenerate)
        val expected = Fixtures.json(exported.answers) as Map<*, *>
        val result = trial.generate(expected["prompt"] as String, trained, sampling = Sampling((expected["tokens"] as Long).toInt()))
        assertEquals(expected["before"] to expected["after"], result.before.text to result.after!!.text)
    }

    /** What is written is told as it grows, one side after the other; two adapters can stand side by side; a stop keeps what is there. */
    @Test
    fun tellsWhatIsWrittenAndStops() {
        val exported = Exported.BLOCKS
        val trained = PeftAdapter(exported.artifact).read(exported.file("adapter"))
        val trial = Trial(exported.session(), Runs.tokenizer)
        val told = ArrayList<TrialResult>()
        val whole = trial.generate("A warm film. It was", trained, other = trained, sampling = Sampling(6)) { told.add(it) }
        assertEquals(whole.before.text, whole.after!!.text)
        val (first, second) = told.partition { it.after == null }
        assertTrue(first.size == 6 && second.size == 6, "${told.size}")
        assertEquals(first.map { it.before.text }, second.map { it.after!!.text })
        assertEquals(first.map { it.before.text!!.length }.sorted(), first.map { it.before.text!!.length })
        assertEquals(whole.after!!.text, told.last().after!!.text)
        var tokens = 0
        val stopped = trial.generate("A warm film. It was", trained, sampling = Sampling(6), shouldStop = { tokens >= 2 }) { tokens++ }
        assertEquals(2, tokens)
        assertEquals("", stopped.after!!.text)
        assertTrue(stopped.before.text!!.isNotEmpty())
    }

    /** In a chat the prompt is a user's turn of the model's own template. */
    @Test
    fun asksAsTheChatTemplateDoes() {
        val exported = Exported.BLOCKS
        val trial = Trial(exported.session(), Runs.tokenizer)
        assertTrue(trial.canChat, "${Runs.tokenizer.chatTemplate}")
        val flat = exported.artifact.first(exported.manifest.spec.adapter).floats()
        val text = ChatTemplate.of(Runs.tokenizer.chatTemplate!!).render(listOf(Turn("user", "Hi")), ask = true)
        val plain = trial.generate(text, flat, sampling = Sampling(4)).after!!.text
        assertEquals(plain, trial.generate("Hi", flat, asChat = true, sampling = Sampling(4)).after!!.text)
        assertNotEquals(plain, trial.generate("Hi", flat, sampling = Sampling(4)).after!!.text)
        assertThrows(OndeviceException::class.java) { trial.generate(" ", flat, asChat = true) }
    }

    @Test
    fun judgedAnswersAreRows() {
        val file = JudgedFile(java.io.File(Fixtures.scratch(), "judged.jsonl"))
        assertEquals(emptyList<JudgedAnswer>(), file.read())
        file.put(JudgedAnswer("Wie?\n\"so\"", "So 🐈.", true))
        file.put(JudgedAnswer("b", "c", false))
        assertEquals(listOf(true, false, null), listOf(file.of("Wie?\n\"so\"", "So 🐈."), file.of("b", "c"), file.of("b", "d")))
        file.put(JudgedAnswer("b", "c", true)) // a change of mind
        assertEquals(listOf(true, true), file.read().map { it.liked })
        assertEquals("""{"prompt":"b","answer":"c","liked":true}""", file.file.readLines()[1])
        file.delete(0)
        assertEquals(listOf(JudgedAnswer("b", "c", true)), file.read())
        file.file.appendText("{\"prompt\": 1}\n")
        val error = assertThrows(OndeviceException::class.java) { file.read() }
        assertTrue("judged.jsonl:2" in error.message!!, error.message)
    }

    /** With a program that can write; its next token is one more than the last one's id, its end is token 257. */
    @Test
    fun writesWithNextToken() {
        val columns = 8
        val size = Exported.ZEROTH_ORDER.manifest.spec.adapterSize
        val method = ProgramMethod(
            listOf(
                Port("ids", Role.IDS, DType.INT64, listOf(1, columns)), Port("length", Role.LENGTH, DType.INT64, listOf(1)),
                Port("adapter", Role.STATE, DType.FLOAT32, listOf(size)),
            ),
            listOf(Port("logits", Role.LOGITS, DType.FLOAT32, listOf(260))), 0, emptyList(), 0, 0,
        )
        val counting = object : Program {
            override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> {
                val length = inputs[1].longs()[0].toInt()
                val last = inputs[0].longs()[length - 1].toInt()
                assertTrue(inputs[0].longs().drop(length).all { it == 256L })
                val end = if (inputs[2].floats().all { it == 0f }) 'e' else 'h'
                val next = if (last >= end.code) 257 else last + 1
                return listOf(Tensor.of(FloatArray(260) { if (it == next) 5f else 0f }, 260))
            }

            override fun close() {}
        }
        val session = Session(changed(Exported.ZEROTH_ORDER, mapOf(WholeSteps.NEXT_TOKEN to method)), counting)
        val trial = Trial(session, Runs.tokenizer)
        val result = trial.generate("0123456789a", FloatArray(size) { 1f })
        assertEquals("bcde" to "bcdefgh", result.before.text to result.after!!.text)
        assertEquals("bc", trial.generate("a", FloatArray(size), sampling = Sampling(2)).before.text)
    }

    private fun changed(exported: Exported, methods: Map<String, ProgramMethod>) =
        exported.manifest.let { Artifact(exported.artifact.folder, it.copy(spec = it.spec.copy(methods = methods))) }

    @Test
    fun temperatureDrawsByProbability() {
        val logits = floatArrayOf(0f, 1f, 2f, Float.NaN)
        assertEquals(2, Sampling(temperature = 0f).pick(logits, Random(0)))
        val random = Random(0)
        val counts = IntArray(4)
        repeat(30_000) { counts[Sampling(temperature = 1f).pick(logits, random)]++ }
        val expected = listOf(0.0900, 0.2447, 0.6652, 0.0)
        for (index in 0..3) assertTrue(abs(counts[index] / 30_000.0 - expected[index]) < 0.01, counts.toList().toString())
    }
}

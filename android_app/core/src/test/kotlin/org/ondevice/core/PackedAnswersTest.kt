package org.ondevice.core

import org.junit.jupiter.api.AfterAll
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertNotEquals
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import java.io.File
import kotlin.random.Random

/** The program that answers with packed weights says what the training program's whole row says, and what Python writes. */
class PackedAnswersTest {
    private val session = Session(artifact, program)
    private val packed = PackedAnswers(artifact, answering)
    private val tokenizer = artifact.tokenizer()
    private val adapted = Random(7).let { random -> FloatArray(session.adapter.size) { (random.nextFloat() - 0.5f) / 4 } }

    @Test
    fun itsLogitsAreThoseOfTheWholeRowUnderEitherAdapter() {
        val ids = IntArray(41) { 40 + it * 3 }
        val found = listOf(session.adapter, adapted).map { flat ->
            val row = LongArray(session.nextTokenColumns) { (if (it < ids.size) ids[it] else tokenizer.padId).toLong() }
            val reader = packed.reader(flat)
            reader.feed(ids.copyOf(30))
            for (place in 30 until ids.size - 1) reader.feed(intArrayOf(ids[place]))
            reader.feed(ids.copyOfRange(ids.size - 1, ids.size)).also { assertArrayEquals(session.nextToken(row, ids.size, flat), it, 1e-4f) }
        }
        assertTrue(found[0].zip(found[1].toList()).maxOf { (a, b) -> Math.abs(a - b) } > 0.1f)
    }

    /** A call takes 128 tokens, and a conversation 200. */
    @Test
    fun anyCutOfAPromptGivesTheSame() {
        val prompt = IntArray(190) { 40 + it % 150 }
        val expected = packed.reader(adapted).also { assertEquals(200, it.contextTokens) }.feed(prompt)
        for (cut in listOf(1, 128, 189)) {
            val reader = packed.reader(adapted)
            reader.feed(prompt.copyOf(cut))
            assertArrayEquals(expected, reader.feed(prompt.copyOfRange(cut, prompt.size)), 1e-4f)
        }
        val reader = packed.reader(adapted)
        for (ids in listOf(IntArray(201), IntArray(0))) assertThrows(OndeviceException::class.java) { reader.feed(ids) }
        packed.reader(adapted)
        assertThrows(IllegalStateException::class.java) { reader.feed(intArrayOf(1)) }
    }

    @Test
    fun tryWritesWithIt() {
        val expected = Fixtures.json("blocks answers.json") as Map<*, *>
        val trained = PeftAdapter(artifact).read(File(Fixtures.folder, "blocks run/adapter"))
        val trial = Trial(session, tokenizer, packed)
        val prompt = expected["prompt"] as String
        program.calls.clear()
        val told = ArrayList<TrialResult>()
        val result = trial.generate(prompt, trained, sampling = Sampling((expected["tokens"] as Long).toInt())) { told.add(it) }
        assertEquals(expected["before"] to expected["after"], result.before.text to result.after!!.text)
        assertTrue(told.size > 2 && told.first().before.text!!.length < result.before.text!!.length)
        assertEquals(emptySet<String>(), program.calls)
        val drawn = { seed: Long, p: Float -> trial.generate(prompt, adapted, sampling = Sampling(12, 2f, p, seed)).after!!.text!! }
        assertEquals(drawn(3, 0.9f), drawn(3, 0.9f))
        assertNotEquals(drawn(3, 0.9f), drawn(4, 0.9f))
        val after = result.after!!.text!!
        val word = after.substring(3, 5)
        assertEquals(after.substringBefore(word), trial.generate(prompt, trained, sampling = Sampling(32, stop = listOf(word))).after!!.text)
        val chat = ChatTemplate.of(tokenizer.chatTemplate!!).render(listOf(Turn("user", "Hi")), ask = true)
        assertEquals(trial.generate(chat, adapted, sampling = Sampling(4)).after!!.text, trial.generate("Hi", adapted, asChat = true, sampling = Sampling(4)).after!!.text)
        assertTrue(trial.generate("word ".repeat(80), adapted, sampling = Sampling(500)).after!!.text!!.isNotEmpty())
    }

    @Test
    fun aProgramForOtherAdaptersIsRefused() {
        val folder = Fixtures.copyOfArtifact(artifact.folder)
        val file = File(folder, AnswersInfo.FILE_NAME)
        val whole = file.readText()
        val described = Json.parse(whole) as Map<*, *>
        val layout = described["layout"] as List<*>
        for ((field, value) in listOf("format" to 2L, "rank" to 3L, "layout" to layout.drop(1), "adapter_size" to 5L)) {
            file.writeText(Json.write(described.mapKeys { it.key.toString() } + (field to value)))
            val changed = Artifact.open(folder, checkFiles = false)
            assertThrows(OndeviceException::class.java, { PackedAnswers(changed, answering) }, field)
        }
        assertThrows(OndeviceException::class.java) { PackedAnswers(Artifact.open(Fixtures.blocks), answering) }
    }

    companion object {
        private val artifact: Artifact by lazy { Artifact.open(File(Fixtures.folder, "packed answers")) }
        private val program: PipeProgram by lazy { PipeProgram(artifact.folder, Fixtures.python, Fixtures.root) }
        private val answering: PipeProgram by lazy { PipeProgram(artifact.folder, Fixtures.python, Fixtures.root, AnswersInfo.PROGRAM_NAME) }

        @JvmStatic
        @AfterAll
        fun close() = listOf(program, answering).forEach { it.close() }
    }
}

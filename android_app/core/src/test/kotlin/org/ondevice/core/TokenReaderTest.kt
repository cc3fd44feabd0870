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

/** The real program with a cache writes what it writes when it computes the whole row for every token. */
class TokenReaderTest {
    private val session = Session(artifact, program)
    private val tokenizer = artifact.tokenizer()
    private val adapted = Random(7).let { random -> FloatArray(session.adapter.size) { (random.nextFloat() - 0.5f) / 4 } }
    private val prompt = IntArray(41) { 40 + it * 3 }
    private val base = session.adapter

    private fun reader(flat: FloatArray) = session.reader(tokenizer.padId, flat)

    private fun whole(ids: IntArray, flat: FloatArray): FloatArray {
        val row = LongArray(session.nextTokenColumns) { (if (it < ids.size) ids[it] else tokenizer.padId).toLong() }
        return session.nextToken(row, ids.size, flat)
    }

    @Test
    fun keysAndValuesThatAreKeptChangeNothing() {
        for (flat in listOf(base, adapted)) {
            val reader = reader(flat)
            assertEquals(60, reader.contextTokens)
            var ids = prompt
            var logits = reader.feed(prompt)
            repeat(15) {
                assertArrayEquals(whole(ids, flat), logits, 1e-4f)
                val next = Sampling().pick(logits, Random(0))
                ids += next
                logits = reader.feed(intArrayOf(next))
            }
        }
        assertTrue(whole(prompt, base).zip(whole(prompt, adapted)).maxOf { (a, b) -> Math.abs(a - b) } > 0.1f)
    }

    /** A prompt is read 32 tokens at a time, and one at a time where fewer places are left. */
    @Test
    fun anyCutOfAPromptGivesTheSame() {
        val expected = reader(adapted).feed(prompt)
        for (cut in listOf(1, 2, 32, 33, 40)) {
            val reader = reader(adapted)
            reader.feed(prompt.copyOf(cut))
            assertArrayEquals(expected, reader.feed(prompt.copyOfRange(cut, prompt.size)), 1e-5f)
        }
        val full = reader(base)
        full.feed(IntArray(59) { 65 })
        full.feed(intArrayOf(66)) // the last place
        for (ids in listOf(intArrayOf(67), intArrayOf())) assertThrows(OndeviceException::class.java) { full.feed(ids) }
    }

    @Test
    fun tryWritesWithTheCacheAndStopsWhereItIsTold() {
        val trial = Trial(session, tokenizer)
        program.calls.clear()
        val text = "A warm film. It was"
        val (before, after) = trial.generate(text, adapted, sampling = Sampling(12)).let { it.before.text!! to it.after!!.text!! }
        assertTrue("block_decode" in program.calls && program.calls.none { it.startsWith("block_forward") }, "${program.calls}")
        assertNotEquals(before, after)
        assertEquals(before, trial.generate(text, base, sampling = Sampling(12)).after!!.text)
        val drawn = { seed: Long, p: Float -> trial.generate(text, adapted, sampling = Sampling(12, 2f, p, seed)).after!!.text!! }
        assertEquals(after, drawn(3, 1e-6f)) // the likeliest alone
        assertEquals(drawn(3, 0.9f), drawn(3, 0.9f))
        assertNotEquals(drawn(3, 0.9f), drawn(4, 0.9f))
        val word = after.substring(3, 5)
        val stopped = trial.generate(text, adapted, sampling = Sampling(12, stop = listOf("never there", word))).after!!.text
        assertEquals(after.substringBefore(word), stopped)
        // A text beyond the context loses its begin; an answer ends where the context does.
        val long = trial.generate("word ".repeat(40), adapted, sampling = Sampling(500)).after!!.text!!
        assertTrue(long.isNotEmpty())
    }

    @Test
    fun topPKeepsTheFewestThatReachIt() {
        val logits = floatArrayOf(Math.log(0.5).toFloat(), Math.log(0.2).toFloat(), Math.log(0.3).toFloat())
        val drawn = { p: Float -> Random(0).let { random -> List(200) { Sampling(1, 1f, p).pick(logits, random) }.toSet() } }
        assertEquals(listOf(setOf(0), setOf(0, 2), setOf(0, 1, 2)), listOf(0.5f, 0.6f, 1f).map(drawn))
        for (wrong in listOf({ Sampling(0) }, { Sampling(1, -1f) }, { Sampling(1, 0f, 0f) }, { Sampling(1, stop = listOf("")) })) {
            assertThrows(OndeviceException::class.java) { wrong() }
        }
    }

    @Test
    fun aManifestWithAnotherCacheIsRefused() {
        val top = Json.parse(File(artifact.folder, ManifestReader.FILE_NAME).readText()) as Map<*, *>
        val spec = top["program_spec"] as Map<*, *>
        fun with(change: (MutableMap<String, Any?>) -> Unit): Manifest {
            val methods = (spec["methods"] as Map<*, *>).entries.associateTo(LinkedHashMap()) { it.key.toString() to it.value }.also(change)
            return ManifestReader.parse(Json.write(top.mapKeys { it.key.toString() } + ("program_spec" to spec + ("methods" to methods))))
        }
        fun ports(method: String, side: String, change: (Map<*, *>) -> Map<*, *>) = with { all ->
            val old = all.getValue(method) as Map<*, *>
            all[method] = old + (side to (old[side] as List<*>).map { change(it as Map<*, *>) })
        }
        with {}
        val layers = (spec["layers"] as Number).toInt()
        fun kinds() = ManifestReader.parse(Json.write(top.mapKeys { it.key.toString() } + ("program_spec" to spec + ("kinds" to List(layers) { 0 }))))
        fun refused(vararg words: String, work: () -> Unit) {
            val said = assertThrows(OndeviceException::class.java) { work() }.toString()
            for (word in words) assertTrue(word in said, said)
        }
        refused("blocks of one kind", "without context_tokens") { kinds() }
        refused("a method embed_prefill") { with { it.remove("embed_prefill") } }
        refused("block_prefill.inputs.values", "float32 [") {
            ports("block_prefill", "inputs") { if (it["role"] == "values") it + ("shape" to listOf(1, 2, 3)) else it }
        }
        refused("block_decode.outputs.keys", "float32 [") {
            ports("block_decode", "outputs") { if (it["role"] == "keys") it + ("shape" to listOf(1, 2, 3)) else it }
        }
    }

    companion object {
        private val artifact: Artifact by lazy { Artifact.open(File(Fixtures.folder, "writer")) }
        private val program: PipeProgram by lazy { PipeProgram(File(Fixtures.folder, "writer"), Fixtures.python, Fixtures.root) }

        @JvmStatic
        @AfterAll
        fun close() = program.close()
    }
}

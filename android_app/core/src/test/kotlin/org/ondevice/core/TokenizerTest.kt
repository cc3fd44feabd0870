package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.CsvSource
import java.io.File

class TokenizerTest {
    /**
     * Every id that `tokenizers` gives, and every text it decodes to. The texts of tokenizers without a normalizer
     * have characters of all Unicode versions; those of NFC tokenizers only ones whose normalisation Java 17
     * (Unicode 13) knows.
     */
    @ParameterizedTest
    @CsvSource("smollm2, 10000", "qwen2, 10000", "llama3, 3000", "digits, 3000", "prefix, 2000", "tiny, 1000")
    fun sameAsPython(name: String, count: Int) {
        val tokenizer = Fixtures.tokenizer(name)
        val rows = Fixtures.lines("texts/$name.jsonl")
        assertEquals(count, rows.size)
        val wrong = ArrayList<String>()
        for (row in rows) {
            val text = row["text"] as String
            val ids = Fixtures.ints(row["ids"])
            val received = tokenizer.encode(text)
            if (!received.contentEquals(ids)) wrong.add("encode ${shown(text)}: ${ids.toList().take(20)}, not ${received.toList().take(20)}")
            if (!tokenizer.encode(text, addSpecialTokens = true).contentEquals(Fixtures.ints(row["with_special"]))) wrong.add("special ${shown(text)}")
            if (tokenizer.decode(ids, skipSpecialTokens = false) != row["decoded"]) wrong.add("decode ${shown(text)}: ${shown(tokenizer.decode(ids, false))}")
            if (tokenizer.decode(ids) != row["without_special"]) wrong.add("decode without special ${shown(text)}")
        }
        assertTrue(wrong.isEmpty(), "${wrong.size} of ${rows.size} differ:\n${wrong.take(10).joinToString("\n")}")
    }

    @Test
    fun tenThousandTextsTakeSeconds() {
        val texts = Fixtures.lines("texts/smollm2.jsonl").map { it["text"] as String }
        val tokenizer = Fixtures.tokenizer("smollm2")
        val started = System.nanoTime()
        val ids = texts.sumOf { tokenizer.encode(it).size }
        val seconds = (System.nanoTime() - started) / 1e9
        println("tokenizer: ${texts.size} texts, $ids ids in ${"%.2f".format(seconds)} s")
        assertTrue(seconds < 100, "$seconds s") // a busy machine takes a few; what grows with the square of something, an hour
    }

    @Test
    fun bytesThatAreNoTextDecodeAsInRust() {
        val tiny = Fixtures.tokenizer("tiny")
        assertEquals("a\uFFFDb", tiny.decode(intArrayOf(97, 0xE2, 0x82, 98)))
        assertEquals("\uFFFD\uFFFD\uFFFD", tiny.decode(intArrayOf(0xED, 0xA0, 0x80)))
        assertEquals("\uFFFD😀\uFFFD", tiny.decode(intArrayOf(0xFF, 0xF0, 0x9F, 0x98, 0x80, 0xC3)))
        assertEquals("ab", tiny.decode(intArrayOf(97, 99_999, 98)))
    }

    @Test
    fun offsetsNameTheTextOfEveryToken() {
        val text = "Ä 👩‍🚀 naïve<|im_end|>x"
        val tokenizer = Fixtures.tokenizer("smollm2")
        val encoded = tokenizer.encodeWithOffsets(text)
        assertArrayEquals(tokenizer.encode(text), encoded.ids)
        assertEquals(0, encoded.starts.first())
        assertEquals(text.length, encoded.ends.last())
        for (index in encoded.ids.indices) {
            val part = text.substring(encoded.starts[index], encoded.ends[index])
            val decoded = tokenizer.decode(intArrayOf(encoded.ids[index]), skipSpecialTokens = false)
            if ('\uFFFD' !in decoded) assertEquals(decoded, part)
            if (index > 0) assertTrue(encoded.starts[index] in encoded.starts[index - 1]..encoded.ends[index - 1])
        }
    }

    @Test
    fun offsetsSurviveNormalisation() {
        val text = "x e\u0301a<|im_end|>"
        val encoded = Fixtures.tokenizer("qwen2").encodeWithOffsets(text)
        assertEquals(text.length, encoded.ends.last())
        assertEquals(text.indexOf("<|"), encoded.starts.last())
        assertTrue(encoded.ends.contains(5), "a token ends behind the a: ${encoded.ends.toList()}")
    }

    @Test
    fun halfASurrogatePairIsRefused() {
        val error = assertThrows(OndeviceException::class.java) { Fixtures.tokenizer("smollm2").encode("a\ud83d") }
        assertEquals(ErrorKind.DATA, error.kind)
    }

    /** The tables are what the installed `tokenizers` says now. */
    @Test
    fun codePointsAreThoseOfTokenizers() {
        val core = File(Fixtures.root, "android_app/core/src")
        val made = ProcessBuilder(Fixtures.python, File(core, "test/python/code_points.py").path).redirectErrorStream(true).start()
        val source = made.inputStream.readBytes().toString(Charsets.UTF_8)
        assertEquals(0, made.waitFor(), source)
        val version = Regex("`tokenizers` [0-9.]+")
        val committed = File(core, "main/kotlin/org/ondevice/core/CodePoints.kt").readText()
        assertEquals(committed.replace(version, ""), source.replace(version, ""))
        assertTrue(CodePoints.isLetter('ſ'.code) && CodePoints.isNumber(0x2167) && CodePoints.isWhiteSpace(0x85) && !CodePoints.isOther(0x3000))
    }

    @ParameterizedTest
    @CsvSource(
        "\"type\": \"ByteLevel\"|\"type\": \"Metaspace\"|ByteLevel",
        "\"normalizer\": null|\"normalizer\": {\"type\": \"Lowercase\"}|Lowercase",
        "\"continuing_subword_prefix\": null|\"continuing_subword_prefix\": \"##\"|continuing_subword_prefix",
        "\"type\": \"BPE\"|\"type\": \"Unigram\"|BPE",
        "\"merges\": [|\"merges\": [[\"zz\", \"never\"],|merges.0",
        delimiter = '|', quoteCharacter = '`',
    )
    fun otherKindsAreRefusedByName(from: String, to: String, named: String) {
        val folder = Fixtures.scratch()
        val text = File(Fixtures.folder, "tokenizers/smollm2/tokenizer.json").readText()
        assertTrue(from in text, "the fixture has no $from")
        File(folder, "tokenizer.json").writeText(text.replace(from, to))
        val error = assertThrows(OndeviceException::class.java) { TokenizerFile.read(folder) }
        assertEquals(ErrorKind.ARTIFACT, error.kind)
        assertTrue(named in error.message!!, error.message)
    }

    private fun shown(text: String): String = Json.write(if (text.length > 60) text.take(60) + "..." else text)
}

package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.MethodSource
import java.io.File

class DataTest {
    /** Ids, labels, candidates, problems (line and field) and segments, as Python has them. */
    @ParameterizedTest
    @MethodSource("files")
    fun sameAsPython(file: String, tokenizerName: String) {
        val tokenizer = Fixtures.tokenizer(tokenizerName)
        for (expected in Fixtures.json("encoded/$file.$tokenizerName.json") as List<*>) {
            expected as Map<*, *>
            val limit = (expected["length"] as Long).toInt()
            val where = "$file, $tokenizerName, $limit"
            val path = File(Fixtures.folder, "encoded/$file.jsonl")
            val received = try {
                val rows = RowReader.read(path, expected["task"] as String?, allowEmpty = true)
                rows to Encoder(tokenizer, limit, expected["train_on_prompt"] as Boolean).encode(rows, allowEmpty = true)
            } catch (error: OndeviceException) {
                assertEquals(expected["error"], error.kind.errorName, "$where: ${error.message}")
                continue
            }
            val (rows, dataset) = received
            assertEquals(expected["format"], rows.format.formatName, where)
            assertEquals(expected["template"], dataset.template, where)
            assertEquals(expected["problems"], dataset.problems.map { listOf(it.line.toLong(), it.field) }, "$where\n${dataset.problems.joinToString("\n")}")
            assertEquals(expected["too_long"], dataset.tooLong.toLong(), where)
            val items = expected["items"] as List<*>
            assertEquals(items.size, dataset.items.size, where)
            for ((item, wanted) in dataset.items.zip(items)) same(item, wanted as Map<*, *>, tokenizer, "$where, line ${item.line}")
        }
    }

    private fun same(item: Item, wanted: Map<*, *>, tokenizer: Tokenizer, where: String) {
        assertEquals(wanted["ids"], longs(item.example.ids), where)
        assertEquals(wanted["labels"], longs(item.example.labels), where)
        assertEquals(wanted["candidates"], item.candidates.map { listOf(longs(it.ids), longs(it.labels)) }, where)
        assertEquals(wanted["gold"], item.gold?.toLong(), where)
        assertEquals(wanted["line"], item.line.toLong(), where)
        assertEquals(wanted["prompt_tokens"], item.promptTokens.toLong(), where)
        assertEquals(wanted["dropped_tokens"], item.droppedTokens.toLong(), where)
        assertEquals(wanted["segments"], Preview.segments(item.example, tokenizer).map { listOf(it.text, it.trained) }, where)
    }

    @Test
    fun everyProblemSaysWhereAndWhy() {
        val rows = RowReader.read(File(Fixtures.folder, "encoded/odd_lines.jsonl"))
        assertEquals(2, rows.items.size)
        val problems = rows.problems.joinToString("\n")
        for (words in listOf("odd_lines.jsonl:3: is not JSON", ":4: 'prompt': the key occurs twice", ":5: is not UTF-8", ":6: 'prompt': contains a NUL", ":7: 'prompt'", ":8: is not JSON", ":9: expected a JSON object, received null")) {
            assertTrue(words in problems, "$words\nin\n$problems")
        }
    }

    @Test
    fun duplicatesAreReportedAndKept() {
        val rows = RowReader.read(File(Fixtures.folder, "encoded/completion.jsonl"))
        assertEquals(listOf(10 to 1), rows.duplicates)
        assertTrue(rows.items.any { it.line == 10 })
    }

    private fun read(vararg lines: String): Rows =
        RowReader.read("f.jsonl", lines.joinToString("\n").toByteArray(), allowEmpty = true)

    @Test
    fun whatTheAppDoesNotFollowIsLeftOutByName() {
        val answer = """{"role": "assistant", "content": "Apple.""""
        fun turns(extra: String) = """{"messages": [{"role": "user", "content": "Fruit?"}, $answer$extra}]}"""
        for ((key, value) in mapOf("tool_calls" to "[{}]", "reasoning_content" to "\"A fruit.\"", "weight" to "0", "train" to "false", "masked" to "true")) {
            val rows = read(turns(""), turns(", \"$key\": $value"))
            assertEquals(listOf("messages.1.$key"), rows.problems.map { it.field })
            assertTrue("is not read by the app" in rows.problems[0].reason)
        }
        assertEquals(emptyList<RowProblem>(), read(turns(", \"weight\": 1, \"tool_calls\": null, \"train\": true")).problems)
        val history = read("""{"instruction": "a", "output": "b", "history": [["c", "d"]]}""")
        assertEquals(listOf("history"), history.problems.map { it.field })
    }

    @Test
    fun columnsThatNothingReadsAreCounted() {
        val turns = """"messages": [{"role": "user", "content": "Fruit?", "name": "Ann"}, {"role": "assistant", "content": "Apple."}]"""
        assertEquals(mapOf("messages[].name" to 2, "id" to 1), read("{$turns}", "{$turns, \"id\": 7}").unread)
        assertEquals(mapOf("category" to 1), read("""{"instruction": "a", "response": "b", "category": "c"}""").unread)
        val task = """{"task": "sst2", "prompt_fields": {"sentence": "good"}, "label": 1, "split": "x"}"""
        assertEquals(mapOf("split" to 1), read(task).unread)
    }

    @Test
    fun aSystemColumnIsASystemTurn() {
        val row = read("""{"instruction": "a", "output": "b", "system_prompt": "Be brief."}""").items.single()
        assertEquals(listOf("system", "user", "assistant"), row.turns.map { it.role })
        assertEquals("Be brief.\n\n### Instruction:\na\n\n### Response:\n", row.pairs[0].first)
        val chat = read("""{"system": "Be brief.", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}""")
        assertEquals("Be brief.", chat.items.single().turns[0].content)
    }

    @Test
    fun filesThatAreNoJsonLines() {
        for ((content, words) in mapOf(
            "" to "is empty", "  \n\n" to "is empty", "[{\"text\": \"x\"}]" to "JSON list", "{\"a\": 1}" to "cannot tell the format",
            "{\"task\": \"poetry\", \"prompt_fields\": {}}" to "task without a prompt", "nonsense" to "no usable row",
        )) {
            val error = assertThrows(OndeviceException::class.java) { RowReader.read("f.jsonl", content.toByteArray()) }
            assertTrue(words in error.message!!, "$content: ${error.message}")
            assertEquals(ErrorKind.DATA, error.kind)
        }
        val utf16 = assertThrows(OndeviceException::class.java) { RowReader.read("f", "{}".toByteArray(Charsets.UTF_16)) }
        assertTrue("UTF-16" in utf16.message!!)
    }

    @Test
    fun previewShowsWhatIsTrained() {
        val tokenizer = Fixtures.tokenizer("smollm2")
        val rows = RowReader.read(File(Fixtures.folder, "encoded/sst2_task.jsonl"))
        val preview = Preview.of(rows, Encoder(tokenizer, 32).encode(rows), tokenizer)
        assertEquals(6, preview.rows)
        assertEquals(3, preview.problems.size)
        assertEquals(mapOf("great" to 1, "terrible" to 2), preview.labels)
        assertEquals(listOf(Segment("A warm, funny film. It was", false), Segment(" great", true)), preview.examples[0])
        assertTrue(preview.truncated == 1 && preview.longestTokens > 32)
    }

    @Test
    fun typedExamplesAreJsonLines() {
        val file = File(Fixtures.scratch(), "my examples.jsonl")
        val examples = ExampleFile(file)
        assertEquals(emptyList<TypedExample>(), examples.read())
        examples.add(TypedExample("Q \"1\"\n", "ä 😀"))
        examples.add(TypedExample("", "only"))
        examples.replace(1, TypedExample("second", "x"))
        examples.add(TypedExample("third", "y"))
        examples.delete(0)
        assertEquals(listOf(TypedExample("second", "x"), TypedExample("third", "y")), examples.read())
        assertEquals(2, RowReader.read(file).items.size)
        assertEquals(listOf(file.name), file.parentFile.list()!!.toList())
        for (bad in listOf(TypedExample("p", " "), TypedExample("a\u0000", "b"), TypedExample("\ud83d", "b"))) {
            assertThrows(OndeviceException::class.java) { examples.add(bad) }
        }
        assertThrows(OndeviceException::class.java) { examples.delete(2) }
        examples.delete(0)
        examples.delete(0)
        assertEquals(emptyList<TypedExample>(), examples.read())
    }

    @Test
    fun batchesAreInPythonsOrder() {
        for (order in (Fixtures.json("numbers.json") as Map<*, *>)["orders"] as List<*>) {
            order as Map<*, *>
            val examples = List((order["rows"] as Long).toInt()) { Example(intArrayOf(1, 2), intArrayOf(1, 2)) }
            val seed = order["seed"] as? Long ?: Long.MAX_VALUE
            val batches = Batches(examples, (order["batch"] as Long).toInt(), listOf(8), seed, 0)
            assertEquals(order["at"], List(40) { step -> batches.rowsAt(step).map { it.toLong() } }, "$order")
        }
    }

    @Test
    fun batchesTakeTheSmallestLengthThatFits() {
        val examples = listOf(3, 8, 9).map { size -> Example(IntArray(size) { 5 }, IntArray(size) { 5 }) }
        val batch = Batches(examples, 1, listOf(16, 8), 0, 99)
        val seen = (0 until 3).associate { step -> examples[batch.rowsAt(step)[0]].size to batch.at(step) }
        assertEquals(8, seen.getValue(3).lengthTokens)
        assertEquals(8, seen.getValue(8).lengthTokens)
        assertEquals(16, seen.getValue(9).lengthTokens)
        assertEquals(listOf(5L, 5L, 5L, 99L, 99L, 99L, 99L, 99L), seen.getValue(3).ids.toList())
        assertEquals(5, seen.getValue(3).labels.count { it == IGNORE.toLong() })
        assertThrows(OndeviceException::class.java) { Batches(examples, 1, listOf(8), 0, 0) }
        assertThrows(OndeviceException::class.java) { Batches(emptyList(), 1, listOf(8), 0, 0) }
    }

    @Test
    fun unknownChatTemplateIsRefused() {
        val error = assertThrows(OndeviceException::class.java) { ChatTemplate.of("{{ bos_token }}{% for m in messages %}[INST]{% endfor %}") }
        assertTrue("ChatML" in error.message!!)
        assertEquals("You are a helpful AI assistant named SmolLM, trained by Hugging Face", ChatTemplate.of(Fixtures.tokenizer("smollm2").chatTemplate!!).defaultSystem)
        val newer = Fixtures.tokenizer("digits").chatTemplate!!
        assertEquals("You are helpful, always.", ChatTemplate.of(newer).defaultSystem)
        assertThrows(OndeviceException::class.java) { ChatTemplate.of(newer.replace("'<|im_start|>' + message.role + '\\n'", "'<|im_start|>' + message.role | upper + '\\n'")) }
    }

    companion object {
        @JvmStatic
        fun files(): List<org.junit.jupiter.params.provider.Arguments> = File(Fixtures.folder, "encoded").listFiles()!!.filter { it.name.endsWith(".json") }.sorted().map {
            val (file, tokenizer) = it.name.removeSuffix(".json").split('.')
            org.junit.jupiter.params.provider.Arguments.of(file, tokenizer)
        }

        private fun longs(values: IntArray): List<Long> = values.map { it.toLong() }
    }
}

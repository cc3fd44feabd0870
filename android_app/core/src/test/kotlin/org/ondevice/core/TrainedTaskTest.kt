package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertNull
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.MethodSource
import java.io.File
import java.util.Base64
import kotlin.math.abs

/** Tables, templates of one's own and records of trained tasks, as Python reads and renders them. */
class TrainedTaskTest {
    @ParameterizedTest
    @MethodSource("tables")
    fun aTableHasTheRowsThatPythonReads(name: String) {
        val expected = (Fixtures.json("tables.json") as List<*>).map { it as Map<*, *> }.first { it["name"] == name }
        val bytes = Base64.getDecoder().decode(expected["bytes"] as String)
        same(expected) { RowReader.read(name, bytes, null, texts(expected["columns"]), allowEmpty = false) }
    }

    @ParameterizedTest
    @MethodSource("templates")
    fun aTemplateRendersWhatPythonRenders(name: String) {
        val expected = (Fixtures.json("templates.json") as List<*>).map { it as Map<*, *> }.first { it["name"] == name }
        val task = Template.task(expected["template"] as String, name, "ondevice_task.json")
        val lines = (expected["records"] as List<*>).joinToString("\n") { Json.write(it) }
        same(expected) { RowReader.read("f.jsonl", lines.toByteArray(), task, emptyMap(), allowEmpty = false) }
    }

    private fun same(expected: Map<*, *>, read: () -> Rows) {
        val name = expected["name"]
        val rows = try {
            read()
        } catch (error: OndeviceException) {
            assertEquals(expected["error"], error.kind.errorName, "$name: ${error.message}")
            return
        }
        assertNull(expected["error"], "$name was read")
        assertEquals(expected["format"], rows.format.formatName, "$name")
        assertEquals(expected["labels"], rows.labels.values.toList(), "$name")
        assertEquals(expected["problems"], rows.problems.map { listOf(it.line.toLong(), it.field) }, "$name\n${rows.problems.joinToString("\n")}")
        assertEquals((expected["rows"] as List<*>).size, rows.items.size, "$name")
        for ((row, wanted) in rows.items.zip(expected["rows"] as List<*>)) {
            wanted as Map<*, *>
            val where = "$name, line ${row.line}"
            assertEquals(wanted["line"], row.line.toLong(), where)
            assertEquals(wanted["pairs"], row.pairs.map { listOf(it.first, it.second) }, where)
            assertEquals(wanted["gold"], row.gold?.toLong(), where)
            assertEquals(wanted["answers"], row.answers, where)
            assertEquals(wanted["label"], row.label, where)
            assertEquals(wanted["end"], row.end, where)
            assertEquals(wanted["turns"], row.turns.map { listOf(it.role, it.content) }, where)
        }
    }

    /** A text that the user writes becomes the prompt and the candidates of the training, token by token. */
    @ParameterizedTest
    @MethodSource("records")
    fun aTextIsAskedAsItWasTrained(name: String, tokenizerName: String) {
        val expected = (Fixtures.json("records.json") as List<*>).map { it as Map<*, *> }.first { it["name"] == name && it["tokenizer"] == tokenizerName }
        val tokenizer = Fixtures.tokenizer(tokenizerName)
        val task = TaskRecord.parse(expected["record"] as String, "ondevice_task.json")!!
        val fields = texts(expected["fields"])
        assertTrue(task.fields.filter { !it.isOptional }.map { it.name } == fields.keys.filter { it != "input" }, "${task.fields.map { it.name }}")
        val item = Encoder(tokenizer, 48, chatTemplate = task.chatTemplate ?: tokenizer.chatTemplate).encode(task.rows(fields)).items[0]
        assertEquals(expected["prompt"], item.example.ids.take(item.promptTokens).map { it.toLong() })
        assertEquals(expected["candidates"], item.candidates.map { listOf(it.ids.map(Int::toLong), it.labels.map(Int::toLong)) })
        assertEquals(expected["ends"], task.ends)
        val again = TaskRecord.parse(task.toText(), "again")!!
        assertEquals(task.toText(), again.toText())
        assertEquals(expected["longest"], again.longestAnswerTokens.toLong())
        if (name == "completion") return // an empty prompt is one, too
        val missing = fields - task.fields.first { !it.isOptional }.name
        assertEquals(ErrorKind.DATA, assertThrows(OndeviceException::class.java) { task.rows(missing) }.kind)
    }

    /** The exported program, by the artifact's own record and template, says what Python says of the same texts. */
    @Test
    fun classifiesWithTheNumbersOfPython() {
        val artifact = Artifact.open(File(Fixtures.folder, "tickets artifact"))
        assertNull(artifact.manifest.task)
        val task = artifact.task!!
        assertEquals(listOf("Billing", "Technical help", "Größe 🐈"), task.answers)
        val trained = PeftAdapter(artifact).read(File(Fixtures.folder, "blocks run/adapter"))
        PipeProgram(artifact.folder, Fixtures.python, Fixtures.root).use { program ->
            val trial = Trial(Session(artifact, program), artifact.tokenizer())
            val wrong = ArrayList<Double>()
            for (expected in Fixtures.json("scores.json") as List<*>) {
                expected as Map<*, *>
                val result = trial.classify(task, mapOf("Body" to expected["text"] as String), trained)
                val byAnswer = { side: TrialSide -> task.answers.map { answer -> side.ranked.first { it.answer == answer } } }
                val pairs = byAnswer(result.before).map { it.meanLogLikelihood }.zip(numbers(expected["before"])) +
                    byAnswer(result.after!!).map { it.meanLogLikelihood }.zip(numbers(expected["after"])) +
                    byAnswer(result.after!!).map { it.share }.zip(numbers(expected["shares"]))
                wrong += pairs.map { (ours, python) -> abs(ours - python) }
                assertTrue(abs(result.after!!.ranked.sumOf { it.share } - 1) < 1e-12)
            }
            assertTrue(wrong.size == 36 && wrong.max() < 1e-6, "largest difference ${wrong.max()} of ${wrong.size}")
            assertThrows(OndeviceException::class.java) { trial.classify(task, mapOf("Body" to " "), trained) }
        }
    }

    /** A table is trained on with the template, and the adapter then knows it. */
    @Test
    fun theRecordOfARunIsThatOfItsRows() {
        val artifact = Artifact.open(File(Fixtures.folder, "tickets artifact"))
        val rows = artifact.task!!.read("tickets.csv", File(Fixtures.folder, "tickets.csv").readBytes())
        assertEquals(2, rows.items.size)
        val tokenizer = artifact.tokenizer()
        val record = TaskRecord.of(rows, Encoder(tokenizer, 64).encode(rows), tokenizer, artifact.task)
        assertEquals(artifact.task!!.toText(), record.toText())
        val plain = RowReader.read("t.csv", "Text;Label\nso;a\nno;b\n".toByteArray())
        val own = TaskRecord.of(plain, Encoder(tokenizer, 64).encode(plain), tokenizer, artifact.task)
        assertEquals(listOf("a", "b"), own.labels.values.toList())
        val adapters = Adapters(Fixtures.scratch(), artifact)
        val flat = artifact.first(artifact.manifest.spec.adapter).floats()
        adapters.save("with", flat, task = own)
        adapters.save("without", flat)
        assertEquals(own.toText(), adapters.task("with")!!.toText())
        assertEquals(artifact.task!!.toText(), adapters.task("without")!!.toText())
        val zip = java.io.ByteArrayOutputStream().also { adapters.zip("with", it) }.toByteArray()
        adapters.importZip(zip.inputStream(), "again")
        assertEquals(own.toText(), adapters.task("again")!!.toText())
    }

    @Test
    fun aDamagedRecordIsRefused() {
        val good = """{"version": 1, "format": "classification", "labels": {"a": "a", "b": "b"}}"""
        assertEquals(2, TaskRecord.parse(good, "f")!!.answers.size)
        assertNull(TaskRecord.parse(good.replace("classification", "preference"), "f"))
        assertEquals(listOf("prompt"), TaskRecord.parse(good.replace("classification", "thumbs"), "f")!!.fields.map { it.name })
        for (change in listOf("\"version\": 1" to "\"version\": 2", "\"a\": \"a\"" to "\"a\": 3", "\"labels\"" to "\"other\"", "{\"version\"" to "{\"template\": \"prompt: {a}\", \"version\"")) {
            val error = assertThrows(OndeviceException::class.java, { TaskRecord.parse(good.replace(change.first, change.second), "f") }, "$change")
            assertEquals(ErrorKind.ARTIFACT, error.kind)
        }
    }

    /** What was trained as the end of an answer ends it, and the prompt is the framed one. */
    @Test
    fun writesAsItWasTrainedUpToItsEnd() {
        val tokenizer = Runs.tokenizer
        val end = tokenizer.encode("<|im_end|>").single()
        val text = """{"version": 1, "format": "completion", "ends": ["<|im_end|>"], "max_length_tokens": 40}"""
        val asked = ArrayList<Int>()
        val columns = 32
        val size = Exported.ZEROTH_ORDER.manifest.spec.adapterSize
        val vocab = tokenizer.vocabularySize
        val method = ProgramMethod(
            listOf(
                Port("ids", Role.IDS, DType.INT64, listOf(1, columns)), Port("length", Role.LENGTH, DType.INT64, listOf(1)),
                Port("adapter", Role.STATE, DType.FLOAT32, listOf(size)),
            ),
            listOf(Port("logits", Role.LOGITS, DType.FLOAT32, listOf(vocab))), 0, emptyList(), 0, 0,
        )
        val program = object : Program {
            override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> {
                val length = inputs[1].longs()[0].toInt()
                if (asked.isEmpty()) asked += inputs[0].longs().take(length).map { it.toInt() }
                val last = inputs[0].longs()[length - 1].toInt()
                val next = if (last == 'c'.code) end else if (last in 'a'.code..'z'.code) last + 1 else 'a'.code
                return listOf(Tensor.of(FloatArray(vocab) { if (it == next) 5f else 0f }, vocab.toLong()))
            }

            override fun close() = Unit
        }
        val manifest = Exported.ZEROTH_ORDER.manifest.let { it.copy(spec = it.spec.copy(methods = mapOf(WholeSteps.NEXT_TOKEN to method))) }
        val trial = Trial(Session(Artifact(Exported.ZEROTH_ORDER.artifact.folder, manifest), program), tokenizer)
        val record = TaskRecord.parse(text, "f")!!
        val result = trial.generate("", FloatArray(size), sampling = Sampling(9), task = record, fields = mapOf("prompt" to "Say 1"))
        assertEquals("abc", result.after!!.text)
        assertEquals(tokenizer.encode("Say 1", addSpecialTokens = true).toList(), asked)
        val endless = TaskRecord.parse(text.replace("<|im_end|>", "<none>"), "f")!!
        val whole = trial.generate("", FloatArray(size), sampling = Sampling(9), task = endless, fields = mapOf("prompt" to "Say 1"))
        assertEquals("abcabca", whole.after!!.text, "nine tokens, of which two are no text")
    }

    private fun texts(value: Any?): Map<String, String> = (value as Map<*, *>).entries.associate { "${it.key}" to "${it.value}" }

    private fun numbers(value: Any?): List<Double> = (value as List<*>).map { (it as Number).toDouble() }

    companion object {
        private fun names(file: String) = (Fixtures.json(file) as List<*>).map { (it as Map<*, *>)["name"] as String }

        @JvmStatic
        fun tables(): List<String> = names("tables.json")

        @JvmStatic
        fun templates(): List<String> = names("templates.json")

        @JvmStatic
        fun records(): List<org.junit.jupiter.params.provider.Arguments> = (Fixtures.json("records.json") as List<*>).map {
            it as Map<*, *>
            org.junit.jupiter.params.provider.Arguments.of(it["name"], it["tokenizer"])
        }
    }
}

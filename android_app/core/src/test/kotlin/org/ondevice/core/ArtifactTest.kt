package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.CsvSource
import java.io.ByteArrayInputStream
import java.io.ByteArrayOutputStream
import java.io.File
import java.util.zip.ZipEntry
import java.util.zip.ZipOutputStream

class ArtifactTest {
    private fun refused(block: () -> Unit): OndeviceException = assertThrows(OndeviceException::class.java) { block() }

    @Test
    fun realManifestIsReadWhole() {
        val manifest = Artifact.open(Fixtures.artifact).manifest
        assertEquals(listOf(32, 64), manifest.lengthsTokens)
        assertEquals(2 to 3, manifest.batchSize to manifest.evalBatchSize)
        assertEquals(7L, manifest.generator.seed)
        assertEquals("prge", manifest.method.name)
        val spec = manifest.spec
        assertEquals(setOf("train_step", "train_step_32", "evaluate", "evaluate_32", "next_token", "apply_update"), spec.methods.keys)
        assertEquals(Port("adapter", Role.STATE, DType.FLOAT32, listOf(spec.adapterSize)), spec.methods.getValue("train_step").inputs.first { it.name == "adapter" })
        assertEquals(listOf(StateTensor("adapter", DType.FLOAT32, listOf(spec.adapterSize), true, null)), spec.state)
        assertEquals(listOf(Counter("step", false)), spec.counters)
        assertTrue(spec.frozen in manifest.files && spec.layout.all { it.aOffset == null })
        assertEquals("sst2", manifest.task)
        assertEquals(spec.layout.last().let { it.offset + it.count }, spec.adapterSize)
        assertEquals("train_step_32" to "train_step", manifest.methodFor("train_step", 32) to manifest.methodFor("train_step", 64))
        assertEquals(listOf(32, 64, null), listOf(5, 33, 65).map { manifest.lengthFor(it) })
        assertTrue(manifest.plannedBytes > 0)
    }

    @Test
    fun exactProgramsManifestNamesItsState() {
        val artifact = Exported.BLOCKS.artifact
        val spec = artifact.manifest.spec
        assertEquals(listOf("adapter", "exp_avg", "exp_avg_sq"), spec.state.map { it.name })
        assertEquals(listOf("optimizer_step" to true), spec.counters.map { it.name to it.countsUpdates })
        assertTrue(spec.frozen == null && spec.layout.all { it.aOffset != null })
        val first = artifact.first(spec.adapter).floats()
        assertTrue(spec.layout.all { entry -> first[entry.aOffset!!] != 0f && first[entry.offset] == 0f })
        assertTrue(artifact.first(spec.state[1]).floats().all { it == 0f })
        val other = refused { artifact.first(spec.adapter.copy(shape = listOf(3))) }
        assertTrue("does not fit the manifest" in other.message!!, other.message)
        refused { artifact.first(spec.adapter.copy(name = "nobody")) }
    }

    /** What a session cannot bind, or would lose, is refused before a program is loaded. */
    @Test
    fun programsThatTheSessionCannotRunAreRefused() {
        val manifest = Exported.ZEROTH_ORDER.manifest
        val adapter = manifest.spec.adapter
        val momentum = Port("exp_avg", Role.STATE, DType.FLOAT32, adapter.shape)
        val counter = Port("optimizer_step", Role.COUNTER, DType.INT64, listOf(1))
        val spec = manifest.spec.copy( // as a program of a whole step with an optimizer is
            state = manifest.spec.state + StateTensor("exp_avg", DType.FLOAT32, adapter.shape, false, null),
            counters = manifest.spec.counters + Counter("optimizer_step", true),
            methods = manifest.spec.methods.mapValues { (name, method) ->
                if (name.startsWith("train_step")) method.copy(inputs = method.inputs + momentum + counter, outputs = method.outputs + momentum) else method
            },
        )
        fun refused(words: String, changed: ProgramSpec) {
            val error = refused { ManifestCheck.check(manifest.copy(spec = changed)) }
            assertTrue(words in error.message!!, "$words: ${error.message}")
        }
        fun step(change: (ProgramMethod) -> ProgramMethod) =
            spec.copy(methods = spec.methods + ("train_step" to change(spec.methods.getValue("train_step"))))
        ManifestCheck.check(manifest.copy(spec = spec))
        refused("the state 'exp_avg'", step { method -> method.copy(outputs = method.outputs.filter { it.name != "exp_avg" }) })
        refused("the state 'exp_avg'", step { method -> method.copy(inputs = method.inputs.filter { it.name != "exp_avg" }) })
        refused("a tensor of the state", step { method -> method.copy(outputs = method.outputs.map { if (it.name == "exp_avg") it.copy(shape = listOf(3)) else it }) })
        refused("one port of role losses", step { method -> method.copy(outputs = method.outputs + method.outputs.first { it.role == Role.LOSSES }) })
        refused("one port of role labels", step { method -> method.copy(inputs = method.inputs.filter { it.role != Role.LABELS }) })
        refused("only inputs that the app can give", step { method -> method.copy(inputs = method.inputs + Port("length", Role.LENGTH, DType.INT64, listOf(1))) })
        refused("only inputs that the app can give", spec.copy(counters = emptyList()))
        refused("only inputs that the app can give", spec.copy(state = spec.state.dropLast(1)))
        refused("one adapter", spec.copy(state = spec.state.map { it.copy(isAdapter = true) }))
        refused("layout.1 ", spec.copy(layout = spec.layout.mapIndexed { index, entry -> if (index == 1) entry.copy(aOffset = entry.offset + 1) else entry }))
        refused("program_spec.frozen", spec.copy(frozen = null))
        refused("a SHA-256 of", spec.copy(state = spec.state.map { it.copy(first = "nothing.safetensors") }))
        val next = spec.methods.getValue(WholeSteps.NEXT_TOKEN)
        refused("one port of role logits", spec.copy(methods = spec.methods + (WholeSteps.NEXT_TOKEN to next.copy(outputs = emptyList()))))
    }

    /** Each change of the manifest is refused with words that name what is wrong. */
    @ParameterizedTest
    @CsvSource(
        "\"schema_version\": 2,|\"schema_version\": 1,|export the model again",
        "\"schema_version\": 2,||another version",
        "\"shape\": \"step\"|\"shape\": \"stages\"|step or blocks",
        "\"kept\": \"host\"|\"kept\": \"program\"|mutable buffer",
        "\"counts\": \"run_steps\"|\"counts\": \"hours\"|run_steps or updates",
        "\"evaluates_with\": \"evaluate\"|\"evaluates_with\": \"train_step\"|eval_batch_size",
        "\"frozen\": \"|\"frozen\": \"../|inside the artifact",
        "\"program\": \"program.pte\"|\"program\": \"../program.pte\"|inside the artifact",
        "\"tokenizer/tokenizer.json\": |\"../tokenizer.json\": |inside the artifact",
        "\"program.pte\": \"|\"program.pte\": \"0|64 hexadecimal",
        "\"batch_size\": 2,|\"batch_size\": \"2\",|batch_size",
        "\"batch_size\": 2,|\"batch_size\": 4,|program_spec.methods.train_step",
        "\"adapter_size\": |\"adapter_size\": 1|adapter",
        "\"dtype\": \"int64\"|\"dtype\": \"float16\"|int64 or float32",
        "\"train_step_32\": {|\"train_step_31\": {|train_step_32",
        "\"role\": \"seed\"|\"role\": \"salt\"|salt",
        "\"role\": \"losses\"|\"role\": \"sum\"|one port of role losses",
        "\"offset\": 0,|\"offset\": 7,|layout.1",
        "\"seed\": 7|\"seed\": 7.5|generator.seed",
        "\"lengths_tokens\": [|\"lengths_tokens\": \"x\", \"old\": [|lengths_tokens",
        "\"target\": |\"schema_version\": 2, \"target\": |occurs twice",
        "\"custom_ops\": []|\"custom_ops\": [\"ondevice::randn.out\"]|ondevice::randn.out",
        delimiter = '|', quoteCharacter = '`', nullValues = [],
    )
    fun wrongManifestIsRefused(from: String, to: String?, words: String) {
        val folder = Fixtures.copyOfArtifact()
        val file = File(folder, "manifest.json")
        val text = file.readText()
        assertTrue(from in text, "the manifest has no $from")
        file.writeText(text.replaceFirst(from, to ?: ""))
        val error = refused { Artifact.open(folder) }
        assertEquals(ErrorKind.ARTIFACT, error.kind)
        assertTrue(words in error.message!!, error.message)
    }

    @Test
    fun linkedOpsAreAccepted() {
        val folder = Fixtures.copyOfArtifact()
        val file = File(folder, "manifest.json")
        file.writeText(file.readText().replace("\"custom_ops\": []", "\"custom_ops\": [\"ondevice::randn.out\"]"))
        Artifact.open(folder, linkedOps = setOf("ondevice::randn.out"))
    }

    @Test
    fun npuArtifactWithAPartitionIsRead() {
        val folder = Fixtures.copyOfArtifact()
        val file = File(folder, "manifest.json")
        val text = file.readText()
        assertTrue("\"soc\": null" in text && "XnnpackBackend" in text, "the exporter writes soc and partition")
        file.writeText(text.replace("\"soc\": null", "\"soc\": \"SM8650\", \"new_key\": [1]").replace("XnnpackBackend", "QnnBackend").replace("android-cpu", "android-npu"))
        val manifest = Artifact.open(folder).manifest
        assertEquals(listOf("QnnBackend", "portable"), manifest.partition.getValue("train_step").map { it.backend })
        assertTrue(manifest.partition.getValue("train_step").all { it.operators > 0 && it.bytes > 0 })
        assertEquals("SM8650", manifest.soc)
        assertEquals("android-npu", manifest.target)
    }

    @Test
    fun damagedFilesAreNamed() {
        val missing = Fixtures.copyOfArtifact().also { File(it, "tokenizer/tokenizer.json").delete() }
        refused { Artifact.open(missing) }.let { assertTrue("lacks a file" in it.message!! && "tokenizer/tokenizer.json" in it.message!!) }
        val cut = Fixtures.copyOfArtifact().also { folder -> File(folder, "program.pte").let { it.writeBytes(it.readBytes().copyOf(1000)) } }
        refused { Artifact.open(cut) }.let { assertTrue("program.pte" in it.message!! && "1000 bytes" in it.message!!, it.message) }
        val flipped = Fixtures.copyOfArtifact().also { folder -> File(folder, "program.pte").let { file -> file.writeBytes(file.readBytes().also { it[500] = (it[500] + 1).toByte() }) } }
        refused { Artifact.open(flipped) }.let { assertTrue("has changed" in it.message!! && it.received!!.startsWith("SHA-256")) }
        Artifact.open(flipped, checkFiles = false)
        refused { Artifact.open(Fixtures.scratch()) }.let { assertTrue("is not an artifact" in it.message!!) }
        val truncated = Fixtures.copyOfArtifact().also { folder -> File(folder, "manifest.json").let { it.writeText(it.readText().take(700)) } }
        refused { Artifact.open(truncated) }.let { assertTrue("not readable JSON" in it.message!!) }
        for (error in listOf(refused { Artifact.open(truncated) }, refused { Artifact.open(missing) })) assertTrue(error.hint!!.isNotEmpty())
    }

    private fun zip(entries: Map<String, ByteArray>): ByteArray {
        val out = ByteArrayOutputStream()
        ZipOutputStream(out).use { zip ->
            for ((name, bytes) in entries) {
                zip.putNextEntry(ZipEntry(name))
                zip.write(bytes)
            }
        }
        return out.toByteArray()
    }

    private fun artifactEntries(prefix: String = ""): Map<String, ByteArray> = Fixtures.artifact.walk().filter { it.isFile }
        .associate { prefix + it.relativeTo(Fixtures.artifact).invariantSeparatorsPath to it.readBytes() }

    @Test
    fun libraryImportsListsAndDeletes() {
        val root = File(Fixtures.scratch(), "modèles")
        val library = Library(root)
        assertEquals(emptyList<ArtifactInfo>(), library.list())
        val info = library.importZip(ByteArrayInputStream(zip(artifactEntries())), "SmolLM tiny")
        assertEquals(Fixtures.artifact.resolve("program.pte").length(), info.mappedBytes)
        assertTrue(info.plannedBytes > 0 && info.sizeBytes > info.mappedBytes && info.problem == null)
        val second = library.importZip(ByteArrayInputStream(zip(artifactEntries("some folder/"))), "SmolLM tiny")
        assertEquals("SmolLM tiny 2", second.name)
        val files = Fixtures.artifact.walk().filter { it.isFile }.map { file -> file.relativeTo(Fixtures.artifact).path to { file.inputStream() } }.toList()
        library.importFiles("../a/b", files)
        assertEquals(listOf("SmolLM tiny", "SmolLM tiny 2", "_a_b"), library.list().map { it.name })
        library.open("_a_b", checkFiles = true)
        File(root, "_a_b/tokenizer/tokenizer.json").delete()
        val bad = library.list().last()
        assertTrue(bad.manifest == null && "lacks a file" in bad.problem!!.message!!)
        library.delete("_a_b")
        library.delete("SmolLM tiny")
        assertEquals(listOf("SmolLM tiny 2"), root.list()!!.toList())
        refused { library.open("SmolLM tiny") }
    }

    @Test
    fun hostileZipsLeaveNothing() {
        val outside = Fixtures.scratch()
        val root = File(outside, "models")
        val library = Library(root)
        val entries = artifactEntries()
        val cases = mapOf(
            "leaves its folder" to zip(entries + ("../evil.txt" to ByteArray(3))),
            "leaves its folder " to zip(mapOf("/etc/evil" to ByteArray(3)) + entries),
            "leaves its folder  " to zip(mapOf("a\\..\\b" to ByteArray(3)) + entries),
            "has changed" to zip(entries + ("program.pte" to ByteArray(10))),
            "holds something else" to zip(mapOf("readme.txt" to ByteArray(3))),
            "no zip" to "not a zip at all".toByteArray(),
            "cut off" to zip(entries).let { it.copyOf(it.size / 2) },
            "more than fits" to zip(entries + ("bomb" to ByteArray(32 shl 20))),
        )
        for ((words, bytes) in cases) {
            val error = refused { library.importZip(ByteArrayInputStream(bytes), "x", maxBytes = 16L shl 20) }
            assertTrue(words.trim() in error.message!!, "$words: ${error.message}")
            assertEquals(emptyList<String>(), root.list()!!.toList(), words)
        }
        assertEquals(listOf("models"), outside.list()!!.toList())
    }
}

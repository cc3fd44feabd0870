package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertInstanceOf
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import java.io.File
import java.io.RandomAccessFile
import java.nio.ByteBuffer
import java.nio.ByteOrder

/** A program that is called block by block, and every way in which its files and steps can fail. */
class BlocksTest {
    private val manifest get() = Exported.BLOCKS.manifest
    private val weightsName get() = manifest.spec.blocks!!.weights

    private fun refused(vararg words: String, body: () -> Unit): OndeviceException {
        val error = assertThrows(OndeviceException::class.java) { body() }
        assertEquals(ErrorKind.ARTIFACT, error.kind)
        for (word in words) assertTrue(word in error.message!!, "'$word' in: ${error.message}")
        return error
    }

    /** A session over a copy whose weights file [damage] has changed; the manifest's hashes are not in the way. */
    private fun damaged(damage: (File) -> Unit): Session {
        val folder = Fixtures.copyOfArtifact(Fixtures.blocks)
        damage(File(folder, weightsName))
        return Session(Artifact.open(folder, checkFiles = false), Exported.BLOCKS.program)
    }

    @Test
    fun aWeightsFileThatIsWrongIsSaidInWords() {
        val size = File(Fixtures.blocks, weightsName).length()
        refused("truncated at", "expected", "${size / 2}", "copy the artifact again") { damaged { file -> RandomAccessFile(file, "rw").use { it.setLength(size / 2) } } }
        refused("no whole safetensors file") { damaged { it.writeBytes(ByteArray(100)) } }
        refused("cannot be read", weightsName) { damaged { it.delete() } }
        refused("no whole safetensors file") { damaged { it.writeBytes(ByteArray(3)) } }
        refused("holds the weights of another model", "no such tensor") { damaged { file -> write(file, mapOf("x" to listOf(16))) } }
        val name = "model.embed_tokens.weight"
        refused("another model: model.norm.weight", "float32 [") { damaged { file -> relabel(file, "model.norm.weight", "model.norn.weight") } }
        refused("not aligned", "multiple of 64") { damaged { file -> shift(file) } }
        refused("has changed or is cut off") { Artifact.open(Fixtures.copyOfArtifact(Fixtures.blocks).also { File(it, weightsName).appendBytes(ByteArray(1)) }) }
        assertTrue(name in MappedWeights(File(Fixtures.blocks, weightsName)).names)
    }

    /** A safetensors file with zeros, aligned as weights are. */
    private fun write(file: File, tensors: Map<String, List<Int>>) {
        var offset = 0
        val header = tensors.mapValues { (_, shape) ->
            val bytes = 4 * shape.fold(1) { product, length -> product * length }
            mapOf("dtype" to "F32", "shape" to shape, "data_offsets" to listOf(offset, offset + bytes)).also { offset += bytes }
        }
        val text = Json.write(header).padEnd(120, ' ').toByteArray()
        file.writeBytes(ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putLong(text.size.toLong()).array() + text + ByteArray(offset))
    }

    private fun relabel(file: File, from: String, to: String) {
        val bytes = file.readBytes()
        val place = String(bytes, Charsets.ISO_8859_1).indexOf(from)
        to.toByteArray().copyInto(bytes, place)
        file.writeBytes(bytes)
    }

    /** Eight bytes more of header: every tensor is where no runtime may read it as floats in lanes. */
    private fun shift(file: File) {
        val bytes = file.readBytes()
        val length = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN).getLong(0).toInt()
        val head = ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putLong(length + 8L).array()
        file.writeBytes(head + bytes.copyOfRange(8, 8 + length) + ByteArray(8) { ' '.code.toByte() } + bytes.copyOfRange(8 + length, bytes.size))
    }

    private fun changed(change: (Map<*, *>) -> Map<String, Any?>): Manifest {
        val top = Json.parse(File(Fixtures.blocks, ManifestReader.FILE_NAME).readText()) as Map<*, *>
        val spec = change(top["program_spec"] as Map<*, *>)
        return ManifestReader.parse(Json.write(top.mapKeys { it.key.toString() } + ("program_spec" to spec)))
    }

    @Test
    fun aManifestThatDoesNotHoldTogetherIsRefused() {
        fun with(vararg pairs: Pair<String, Any?>) = changed { spec -> spec.mapKeys { it.key.toString() } + pairs }
        fun methods(change: (MutableMap<String, Any?>) -> Unit) = changed { spec ->
            val methods = (spec["methods"] as Map<*, *>).entries.associateTo(LinkedHashMap()) { it.key.toString() to it.value }
            spec.mapKeys { it.key.toString() } + ("methods" to methods.also(change))
        }
        fun ports(method: String, side: String, change: (List<Map<*, *>>) -> List<Any?>) = methods { all ->
            val old = all.getValue(method) as Map<*, *>
            @Suppress("UNCHECKED_CAST")
            all[method] = old + (side to change(old[side] as List<Map<*, *>>))
        }
        assertEquals(manifest.spec, with().spec)
        refused("shape", "step or blocks", "stages") { with("shape" to "stages") }
        refused("state.adapter", "7 equal ranges") { with("layers" to 7) }
        refused("a tile of at most 9 rows") { with("vocab" to 9) }
        refused("'files'", "other.safetensors") { with("weights" to "other.safetensors") }
        refused("a method block_backward_2x32") { methods { it.remove("block_backward_2x32") } }
        refused("kinds", "one for each of 2 layers") { with("kinds" to listOf(0L)) }
        refused("a method block_forward_2x32_1") { with("kinds" to listOf(0L, 1L)) }
        refused("a method head_gradient") { methods { it.remove("head_gradient") } }
        refused("block_forward_3x64", "1 of role hidden") { ports("block_forward_3x64", "inputs") { ports -> ports.filter { it["role"] != "hidden" } } }
        refused("block_backward_2x64.outputs", "exp_avg") { ports("block_backward_2x64", "outputs") { ports -> ports.filter { it["name"] != "exp_avg" } } }
        refused("head_sums.inputs.targets", "int64 [32]") {
            ports("head_sums", "inputs") { ports -> ports.map { if (it["role"] == "targets") it + ("shape" to listOf(31)) else it } }
        }
        refused("embed_2x64.inputs.ids", "int64 [2, 64]") { ports("embed_2x64", "inputs") { ports -> ports.map { if (it["role"] == "ids") it + ("shape" to listOf(1, 64)) else it } } }
        refused("dtype", "float32, float16, int8 or uint8 weights") {
            ports("embed_2x64", "inputs") { ports -> ports.map { if (it["role"] == "frozen") it + ("dtype" to "bfloat16") else it } }
        }
        refused("loss_scale", "at least 1.0") { with("loss_scale" to 0.5) }
        refused("dtype", "int64 or float32") {
            ports("embed_2x64", "outputs") { ports -> ports.map { it + ("dtype" to "int8") } }
        }
    }

    /** Each layer's block is called by the name of its kind: here both are the same functions. */
    @Test
    fun layersOfTwoKindsAreCalledByTheirNames() {
        val called = ArrayList<String>()
        val program = object : Program by Exported.BLOCKS.program {
            override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> {
                called += method
                return Exported.BLOCKS.program.execute(method.removeSuffix("_1"), inputs, layer)
            }
        }
        val folder = Fixtures.copyOfArtifact(Fixtures.blocks)
        val file = File(folder, ManifestReader.FILE_NAME)
        val top = Json.parse(file.readText()) as Map<*, *>
        val spec = top["program_spec"] as Map<*, *>
        val methods = (spec["methods"] as Map<*, *>).entries.associate { it.key.toString() to it.value }
        val more = methods.filterKeys { it.startsWith("block_") }.mapKeys { "${it.key}_1" }
        file.writeText(Json.write(top.mapKeys { it.key.toString() } + ("program_spec" to spec.mapKeys { it.key.toString() } + mapOf("methods" to methods + more, "kinds" to listOf(0L, 1L)))))
        val batch = Runs.data(manifest).batches.at(0)
        val losses = listOf(Session(Artifact.open(folder, checkFiles = false), program), Exported.BLOCKS.session()).map { it.step(batch, 0, 1e-3).losses.toList() }
        assertEquals(losses[0], losses[1])
        assertEquals(1, called.count { it.startsWith("block_forward") && it.endsWith("_1") })
        assertEquals(1, called.count { it.startsWith("block_backward") && it.endsWith("_1") })
    }

    /** A block's gradient that is no number ends the run; the state is what it was before the step. */
    @Test
    fun aGradientThatIsNoNumberUpdatesNothing() {
        var backward = 0
        val odd = object : Program by Exported.BLOCKS.program {
            override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> {
                val outputs = Exported.BLOCKS.program.execute(method, inputs, layer)
                if (!method.startsWith("block_backward") || ++backward != 6) return outputs // of two layers, the third step's second
                return listOf(outputs[0]) + outputs.drop(1).map { Tensor.of(FloatArray(it.count) { Float.NaN }, it.count.toLong()) }
            }
        }
        val folder = Fixtures.scratch()
        val session = Exported.BLOCKS.session(odd)
        val trainer = Runs.trainer(session, folder)
        trainer.run()
        val failed = assertInstanceOf(TrainerState.Failed::class.java, trainer.state, trainer.state.toString())
        assertTrue(failed.step == 2 && "the gradient of layer 0 is not finite; nothing was updated" in failed.error.message!!, failed.error.message)
        val two = Runs.train(Fixtures.scratch(), Runs.settings.copy(steps = 2), exported = Exported.BLOCKS)
        same(two, session)
    }

    /** Memory that ends in the middle of a step loses that step alone: tried again it gives the same bits. */
    @Test
    fun aStepThatFailsHalfWayLeavesTheStateAsItWas() {
        var fails = true
        val program = object : Program by Exported.BLOCKS.program {
            override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> {
                if (fails && method.startsWith("block_backward") && inputs.any { it.mapped?.name?.startsWith("model.layers.0.") == true }) throw OutOfMemoryError("no more")
                return Exported.BLOCKS.program.execute(method, inputs, layer)
            }
        }
        val session = Exported.BLOCKS.session(program)
        val straight = Exported.BLOCKS.session()
        val batch = Runs.data(manifest).batches.at(0)
        assertThrows(OutOfMemoryError::class.java) { session.step(batch, 0, 0.01) }
        same(straight, session)
        fails = false
        assertEquals(straight.step(batch, 0, 0.01).loss, session.step(batch, 0, 0.01).loss)
        same(straight, session)
    }

    private fun same(expected: Session, received: Session) {
        for ((name, tensor) in expected.state()) {
            tensor.floats?.let { assertArrayEquals(it, received.state().getValue(name).floats, name) }
            tensor.longs?.let { assertArrayEquals(it, received.state().getValue(name).longs, name) }
        }
    }

    /** Rows without a label count nothing; more labels than the head takes at once go through it in turn. */
    @Test
    fun everyLabelCountsOnce() {
        val session = Exported.BLOCKS.session()
        val whole = Exported.ZEROTH_ORDER.session() // B is zero in both: the same model
        val ids = LongArray(3 * 64) { (it * 7L) % 250 }
        val labels = LongArray(ids.size) { if (it < 64) IGNORE.toLong() else ids[it] }
        val batch = Batch(3, 64, ids, labels)
        val (mine, theirs) = session.evaluate(batch) to whole.evaluate(batch)
        assertEquals(listOf(0L, 63L, 63L), mine.tokens.toList())
        assertEquals(theirs.tokens.toList(), mine.tokens.toList())
        for (row in 0 until 3) assertEquals(theirs.nll[row], mine.nll[row], 1e-5f * theirs.nll[row] + 1e-9f)
        val none = Batch(2, 64, ids.copyOf(128), LongArray(128) { IGNORE.toLong() })
        val before = session.adapter
        assertEquals(0.0, session.step(none, 0, 0.01).loss)
        assertArrayEquals(before, session.adapter)
    }

    @Test
    fun otherSizesAreRefusedByName() {
        val session = Exported.BLOCKS.session()
        fun batch(rows: Int, tokens: Int) = Batch(rows, tokens, LongArray(rows * tokens), LongArray(rows * tokens))
        refused("17 tokens", "32, 64") { session.step(batch(2, 17), 0, 0.01) }
        refused("takes 2 rows") { session.step(batch(3, 64), 0, 0.01) }
        refused("takes 3 rows") { session.evaluate(batch(2, 64)) }
    }

    @Test
    fun anAdapterOfAnotherRankIsRefused() {
        val peft = PeftAdapter(Exported.BLOCKS.artifact)
        val folder = Fixtures.scratch()
        Exported.BLOCKS.file("adapter").copyRecursively(folder)
        val config = File(folder, PeftAdapter.CONFIG_NAME)
        val rank = manifest.spec.rank
        config.writeText(config.readText().replace("\"r\": $rank", "\"r\": ${rank * 2}"))
        refused("another rank or scale", "r $rank", "r ${rank * 2}") { peft.read(folder) }
        refused("another rank or scale") { peft.read(Exported.ZEROTH_ORDER.file("adapter")) }
    }

    /** PEFT's files of the run are compared in TrainerTest; these are mlx-lm's, byte for byte. */
    @Test
    fun mlxLmFilesAreThoseThatPythonWrites() {
        for (exported in listOf(Exported.BLOCKS, Exported.ZEROTH_ORDER)) {
            val flat = PeftAdapter(exported.artifact).read(exported.file("adapter"))
            val folder = Fixtures.scratch()
            MlxLmAdapter(exported.artifact).write(flat, folder)
            for (name in listOf(MlxLmAdapter.WEIGHTS_NAME, MlxLmAdapter.CONFIG_NAME)) {
                val known = File(Fixtures.folder, "${exported.run} mlx/$name")
                assertArrayEquals(known.readBytes(), File(folder, name).readBytes(), "${exported.name} $name")
            }
        }
    }
}

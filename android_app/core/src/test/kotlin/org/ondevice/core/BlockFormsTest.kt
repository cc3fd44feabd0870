package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertInstanceOf
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Assumptions.assumeTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.ValueSource
import java.io.File

/**
 * Block programs over packed weights, with a program for each layer, and for the NPU: the real programs, in ExecuTorch and
 * in Qualcomm's simulator, against `ondevice run`.
 */
class BlockFormsTest {
    private fun folder(form: String): File = File(Fixtures.folder, "blocks $form").also {
        val reason = File(Fixtures.folder, "npu.txt")
        assumeTrue(it.isDirectory || form != "npu" || !reason.isFile, "no simulator here: ${reason.takeIf(File::isFile)?.readText()}")
    }

    private fun <T> program(form: String, body: (Artifact, Program) -> T): T {
        val artifact = Artifact.open(folder(form))
        return PipeProgram(artifact.folder, Fixtures.python, Fixtures.root).use { body(artifact, it) }
    }

    private fun settings(steps: Int) = TrainSettings(steps = steps, learningRate = 0.01, checkpointEvery = 2, evaluateBefore = false)

    /** Losses, evaluations, adapter and checkpoint bit for bit; the second half of the steps after a resume. */
    @ParameterizedTest
    @ValueSource(strings = ["int8", "q4", "q4dq", "8da8w", "8da4w", "gemma", "npu"])
    fun everyFormGivesPythonsRun(form: String) = program(form) { artifact, program ->
        val folder = Fixtures.scratch()
        lateinit var first: Trainer
        first = Runs.trainer(Session(artifact, program), folder, settings(4), evaluate = true, listener = object : TrainerListener {
            override fun onEvent(event: Event) {
                if (event is Event.Step && event.step == 1) first.stop()
            }
        })
        first.run()
        val second = Runs.trainer(Session(artifact, program), folder, settings(4), StartMode.RESUME, evaluate = true)
        second.run()
        assertInstanceOf(TrainerState.Finished::class.java, second.state, second.state.toString())
        val known = File(Fixtures.folder, "blocks $form run")
        val (ours, theirs) = listOf(folder, known).map { EventLog.read(File(it, "events.jsonl")) }
        assertEquals(4, theirs.losses.size)
        assertEquals(theirs.losses.map { it.second.toFloat() }, ours.losses.map { it.second.toFloat() })
        val evaluations = listOf(theirs, ours).map { log -> log.entries.filter { it.kind == "evaluate" }.map { Triple(it.step, it.number("loss")!!.toFloat(), it.number("accuracy")) } }
        assertEquals(evaluations[0], evaluations[1])
        val states = listOf(known, folder).map { Safetensors.read(File(it, "checkpoint-00000004/state.safetensors")).tensors }
        assertEquals(states[0].keys, states[1].keys)
        for ((name, tensor) in states[0]) {
            tensor.floats?.let { assertArrayEquals(it, states[1].getValue(name).floats, name) }
            tensor.longs?.let { assertArrayEquals(it, states[1].getValue(name).longs, name) }
        }
        val weights = listOf(known, folder).map { File(it, "adapter/adapter_model.safetensors").readBytes() }
        assertArrayEquals(weights[0], weights[1])
    }

    /** What comes out of a block's backward pass too large for float16 leaves the step out and halves the scale, until it cannot. */
    @Test
    fun aStepThatOverflowsIsLeftOut() = program("npu") { artifact, real ->
        var overflows = true
        val session = Session(artifact, object : Program by real {
            override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> {
                val outputs = real.execute(method, inputs, layer)
                if (!overflows || layer != 0 || !method.startsWith(BlockSteps.BACKWARD)) return outputs
                return outputs.mapIndexed { index, it -> if (index == 0) it else Tensor.of(FloatArray(it.count) { Float.NaN }, it.count.toLong()) }
            }
        })
        val before = session.state()
        assertEquals(1024f, before.getValue("loss_scale").floats!![0])
        val batch = Runs.data(artifact.manifest).batches.at(0)
        val left = session.step(batch, 0, 0.01)
        assertTrue("the gradient of layer 0 is not finite; nothing was updated; the loss scale is now 512" in left.warning!!, left.warning)
        val after = session.state()
        assertEquals(512f, after.getValue("loss_scale").floats!![0])
        for ((name, tensor) in before) {
            tensor.longs?.let { assertArrayEquals(it, after.getValue(name).longs, name) }
            if (name != "loss_scale") tensor.floats?.let { assertArrayEquals(it, after.getValue(name).floats, name) }
        }
        repeat(9) { session.step(batch, 0, 0.01) }
        val error = assertThrows(OndeviceException::class.java) { session.step(batch, 0, 0.01) }
        assertTrue(error.kind == ErrorKind.TRAINING && error.received == "loss scale 1.0", "$error")
        overflows = false
        assertEquals(null, session.step(batch, 0, 0.01).warning)
        val lacking = assertThrows(OndeviceException::class.java) { session.load(after - "loss_scale") }
        assertTrue(lacking.kind == ErrorKind.CHECKPOINT && "loss_scale" in lacking.message!!, lacking.message)
    }

    /** What a block reads of its tokens or of another block must come from a function of the program, in its shape. */
    @Test
    fun whatBlocksHandToEachOtherIsChecked() {
        val top = (Json.parse(File(folder("gemma"), ManifestReader.FILE_NAME).readText()) as Map<*, *>).mapKeys { it.key.toString() }
        val spec = (top["program_spec"] as Map<*, *>).mapKeys { it.key.toString() }
        val methods = (spec["methods"] as Map<*, *>).mapKeys { it.key.toString() }
        fun refused(words: String, changed: Map<String, Any?>) {
            val error = assertThrows(OndeviceException::class.java) { ManifestReader.parse(Json.write(top + ("program_spec" to spec + ("methods" to changed)))) }
            assertTrue(error.kind == ErrorKind.ARTIFACT && words in error.message!!, "'$words' in: ${error.message}")
        }
        fun outputs(method: String, change: (List<Map<*, *>>) -> List<Any?>): Map<String, Any?> {
            val old = methods.getValue(method) as Map<*, *>
            @Suppress("UNCHECKED_CAST")
            return methods + (method to old + ("outputs" to change(old["outputs"] as List<Map<*, *>>)))
        }
        val lender = "block_forward_2x32"
        refused("what a block before layer 2 gives", outputs(lender) { ports -> ports.filter { it["role"] == "hidden" } })
        refused("what a block before layer 2 gives", outputs(lender) { ports -> ports.map { if (it["role"] == "shared_keys") it + ("shape" to listOf(2, 32, 1, 7)) else it } })
        refused("shared_keys", outputs(lender) { ports -> ports.map { if (it["role"] == "shared_keys") it + ("shape" to listOf(3, 32, 1, 24)) else it } })
        refused("only ports that the app can bind", methods.filterKeys { !it.startsWith("layer_input_") })
        refused("float32 [64, 7]", outputs("layer_input_2x32") { ports -> ports.map { it + ("shape" to listOf(64, 7)) } })
    }

    /** A layer's program that is missing, of a name that leaves the folder, or of a program of whole steps is refused. */
    @Test
    fun programsOfLayersAreChecked() {
        fun refused(vararg words: String, body: () -> Unit) {
            val error = assertThrows(OndeviceException::class.java) { body() }
            for (word in words) assertTrue(error.kind == ErrorKind.ARTIFACT && word in error.message!!, "'$word' in: ${error.message}")
        }
        val copy = Fixtures.copyOfArtifact(folder("8da8w"))
        File(copy, "layers/1.pte").delete()
        refused("lacks a file", "layers/1.pte") { Artifact.open(copy) }
        File(copy, "layers/1.pte").writeBytes(ByteArray(9))
        refused("layers/1.pte has changed or is cut off") { Artifact.open(copy) }
        val text = File(copy, ManifestReader.FILE_NAME).readText()
        refused("'files'", "layers/0.bin") { ManifestReader.parse(text.replace("layers/{layer}.pte", "layers/{layer}.bin")) }
        refused("a path inside the artifact's folder") { ManifestReader.parse(text.replace("layers/{layer}.pte", "../{layer}.pte")) }
        assertEquals(2, ManifestReader.parse(text).spec.layerPrograms.size)
        val whole = File(Fixtures.artifact, ManifestReader.FILE_NAME).readText()
        val top = Json.parse(whole) as Map<*, *>
        val spec = (top["program_spec"] as Map<*, *>).mapKeys { it.key.toString() }
        val methods = (spec["methods"] as Map<*, *>).mapKeys { it.key.toString() }
        val odd = methods + ("train_step" to (methods.getValue("train_step") as Map<*, *>) + ("program" to "layers/{layer}.pte"))
        refused("null in a program of whole steps") {
            ManifestReader.parse(Json.write(top.mapKeys { it.key.toString() } + ("program_spec" to spec + ("methods" to odd))))
        }
    }
}

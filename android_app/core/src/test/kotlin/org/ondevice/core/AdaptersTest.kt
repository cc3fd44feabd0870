package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertNull
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.EnumSource
import java.io.ByteArrayInputStream
import java.io.ByteArrayOutputStream
import java.io.File
import kotlin.random.Random

class AdaptersTest {
    private val artifact = Exported.ZEROTH_ORDER.artifact

    /** A vector with zeros in the padding between matrices, as the program keeps it. */
    private fun vector(seed: Int, exported: Exported = Exported.ZEROTH_ORDER): FloatArray {
        val random = Random(seed)
        val flat = FloatArray(exported.manifest.spec.adapterSize)
        for (entry in exported.manifest.spec.layout) {
            for (place in 0 until entry.count) flat[entry.offset + place] = random.nextFloat() - 0.5f
            entry.aOffset?.let { for (place in 0 until entry.rank * entry.inputs) flat[it + place] = random.nextFloat() - 0.5f }
        }
        return flat
    }

    private fun refused(block: () -> Unit): OndeviceException = assertThrows(OndeviceException::class.java) { block() }

    /** Reads what Python trained, and writes it again: the same vector, tensors, digest and configuration. */
    @ParameterizedTest
    @EnumSource
    fun pythonsAdapterRoundTrips(exported: Exported) {
        val python = exported.file("adapter")
        val flat = PeftAdapter(exported.artifact).read(python)
        val known = Safetensors.read(exported.file("checkpoint-00000012/state.safetensors")).tensors.getValue("adapter").floats!!
        assertArrayEquals(known, flat)
        val folder = Fixtures.scratch()
        PeftAdapter(exported.artifact).write(flat, folder)
        val (ours, theirs) = listOf(folder, python).map { Safetensors.read(File(it, PeftAdapter.WEIGHTS_NAME)) }
        for ((name, tensor) in theirs.tensors) assertArrayEquals(tensor.floats, ours.tensors.getValue(name).floats, name)
        assertEquals(theirs.metadata, ours.metadata)
        assertEquals(File(python, PeftAdapter.CONFIG_NAME).readText(), File(folder, PeftAdapter.CONFIG_NAME).readText())
    }

    /** Python's own reader, and the session that refuses another frozen A, take what the app writes. */
    @ParameterizedTest
    @EnumSource
    fun pythonLoadsWhatTheAppWrites(exported: Exported) {
        val folder = Fixtures.scratch()
        val flat = vector(1, exported)
        PeftAdapter(exported.artifact).write(flat, folder)
        File(folder, "flat").writeText(flat.joinToString(" ") { it.toRawBits().toString() })
        val code = """
            import sys; import numpy as np
            from pathlib import Path
            from ondevice.api.open import open_artifact
            from ondevice.artifact.adapter import load_adapter
            session = open_artifact(Path(sys.argv[1]))
            session.load_adapter(load_adapter(sys.argv[2]))
            bits = np.array(Path(sys.argv[2], "flat").read_text().split(), dtype=np.int64).astype(np.int32).view(np.float32)
            assert np.array_equal(session.state()["adapter"], bits)
        """.trimIndent()
        val process = ProcessBuilder(Fixtures.python, "-c", code, exported.artifact.folder.path, folder.path).directory(Fixtures.root).redirectErrorStream(true).start()
        val words = process.inputStream.readBytes().toString(Charsets.UTF_8)
        assertEquals(0, process.waitFor(), words)
    }

    @Test
    fun otherAdaptersAreRefused() {
        val folder = Fixtures.scratch()
        val peft = PeftAdapter(artifact)
        peft.write(vector(2), folder)
        val weights = File(folder, PeftAdapter.WEIGHTS_NAME)
        val config = File(folder, PeftAdapter.CONFIG_NAME)
        val (goodWeights, goodConfig) = weights.readBytes() to config.readText()
        fun after(words: String, change: () -> Unit) {
            weights.writeBytes(goodWeights)
            config.writeText(goodConfig)
            peft.read(folder)
            change()
            refused { peft.read(folder) }.let { assertTrue(words in it.message!!, "$words: ${it.message}") }
        }
        after("damaged") { weights.writeBytes(goodWeights.copyOf(goodWeights.size - 8)) }
        after("damaged") { weights.writeBytes(ByteArray(4)) }
        after("has changed") { weights.writeBytes(goodWeights.also { it.copyOf() }.copyOf().also { it[it.size - 3] = (it[it.size - 3] + 1).toByte() }) }
        after("lacks a file") { weights.delete() }
        after("not a PEFT adapter") { config.delete() }
        after("rank or scale") { config.writeText(goodConfig.replace("\"lora_alpha\": 16", "\"lora_alpha\": 32")) }
        after("use_dora") { config.writeText(goodConfig.replace("\"use_dora\": false", "\"use_dora\": true")) }
        after("peft_type") { config.writeText(goodConfig.replace("LORA", "IA3")) }
        weights.writeBytes(goodWeights)
        config.writeText(goodConfig)
        fun withFrozen(change: Float, transposed: Boolean = false): PeftAdapter {
            val copy = Artifact(Fixtures.copyOfArtifact(), artifact.manifest)
            val tensors = artifact.frozen.mapValues { (_, tensor) ->
                StoredTensor(if (transposed) tensor.shape.reversed() else tensor.shape, tensor.floats!!.copyOf().also { it[3] += change })
            }
            File(copy.folder, artifact.manifest.spec.frozen!!).writeBytes(Safetensors(tensors).toBytes())
            return PeftAdapter(copy)
        }
        withFrozen(5e-7f).read(folder) // another machine's logarithm and sine
        refused { withFrozen(1e-5f).read(folder) }.let { assertTrue("frozen A" in it.message!!) }
        refused { withFrozen(Float.NaN).read(folder) }.let { assertTrue("frozen A" in it.message!!) }
        refused { withFrozen(0f, transposed = true).read(folder) }.let { assertTrue("does not fit the manifest" in it.message!!) }
        val nan = vector(3).also { it[5] = Float.NaN }
        assertEquals(ErrorKind.TRAINING, refused { peft.write(nan, Fixtures.scratch()) }.kind)
    }

    @Test
    fun listActivateRollBackShareDelete() {
        val root = File(Fixtures.scratch(), "adapters")
        val adapters = Adapters(root, artifact)
        assertEquals(emptyList<AdapterInfo>(), adapters.list())
        assertNull(adapters.activeName())
        assertTrue(adapters.activeVector().all { it == 0f })
        adapters.save("first run", vector(1), mapOf("steps" to 10))
        adapters.save("été 2", vector(2))
        refused { adapters.save("first run", vector(3)) }.let { assertTrue("already" in it.message!!) }
        for (bad in listOf("", "../x", ".hidden", "a/b", "x".repeat(99))) refused { adapters.save(bad, vector(1)) }
        adapters.activate(null)
        adapters.activate("first run")
        adapters.activate("été 2")
        assertArrayEquals(vector(2), adapters.activeVector())
        assertEquals(listOf("été 2"), adapters.list().filter { it.active }.map { it.name })
        assertEquals(10L, adapters.list().first { it.name == "first run" }.note["steps"])
        assertEquals("first run", adapters.rollBack())
        assertNull(adapters.rollBack())
        refused { adapters.rollBack() }
        adapters.activate("first run")
        adapters.activate("été 2")
        adapters.delete("été 2")
        assertEquals("first run", Adapters(root, artifact).activeName())
        val out = ByteArrayOutputStream()
        adapters.zip("first run", out)
        val shared = adapters.importZip(ByteArrayInputStream(out.toByteArray()), "from a friend")
        assertArrayEquals(vector(1), adapters.load(shared.name))
        assertEquals(adapters.sha256("first run"), adapters.sha256("from a friend"))
        refused { adapters.importZip(ByteArrayInputStream(out.toByteArray().copyOf(200)), "cut") }
        File(shared.folder, PeftAdapter.CONFIG_NAME).writeText("{")
        assertTrue(adapters.list().first { it.name == shared.name }.problem != null)
        refused { adapters.activate(shared.name) }
        refused { adapters.delete("nobody") }
        adapters.addFrom(File(Fixtures.folder, "run/adapter"), "from a run")
        assertEquals(setOf("first run", "from a friend", "from a run", "active.json"), root.list()!!.toSet())
    }

    @Test
    fun safetensorsOfOtherTypesAreRead() {
        val code = """
            import sys, torch
            from safetensors.torch import save_file
            x = torch.tensor([[1.5, -2.0, 0.1], [65504.0, 6e-8, float("inf")]])
            save_file({"half": x.half(), "brain": x.bfloat16(), "full": x, "whole": torch.tensor([2**40, -1])}, sys.argv[1])
        """.trimIndent()
        val file = File(Fixtures.scratch(), "x.safetensors")
        assertEquals(0, ProcessBuilder(Fixtures.python, "-c", code, file.path).inheritIO().start().waitFor())
        val tensors = Safetensors.read(file).tensors
        assertArrayEquals(longArrayOf(1L shl 40, -1), tensors.getValue("whole").longs)
        assertArrayEquals(floatArrayOf(1.5f, -2f, 0.1f, 65504f, 6e-8f, Float.POSITIVE_INFINITY), tensors.getValue("full").floats)
        assertArrayEquals(floatArrayOf(1.5f, -2f, 0.099975586f, 65504f, 5.9604645E-8f, Float.POSITIVE_INFINITY), tensors.getValue("half").floats)
        assertEquals(0.100097656f, tensors.getValue("brain").floats!![2])
        assertEquals(listOf(2, 3), tensors.getValue("half").shape)
    }
}

package org.ondevice.core

import java.io.File
import java.nio.file.Files

/** What `fixtures.py` made; a test that lacks it fails and says which command makes it. */
object Fixtures {
    val folder: File by lazy {
        val found = File(property("ondevice.fixtures"))
        val command = "${property("ondevice.python")} android_app/core/src/test/python/fixtures.py $found"
        if (!File(found, "numbers.json").isFile) throw AssertionError("the tests' fixtures are missing in $found; make them with: $command")
        found
    }
    val artifact: File by lazy { folder.let { File(property("ondevice.artifact")) } }

    /** Of a block program for the same data: exact gradients, an optimizer's vectors, a trained A, weights in a file of their own. */
    val blocks: File by lazy { File(folder, "blocks") }
    val root: File by lazy { File(property("ondevice.root")).canonicalFile }
    val python: String by lazy { property("ondevice.python") }

    fun json(name: String): Any? = Json.parse(File(folder, name).readText())

    fun lines(name: String): List<Map<*, *>> = File(folder, name).readText().split('\n').filter { it.isNotEmpty() }.map { Json.parse(it) as Map<*, *> }

    fun tokenizer(name: String): Tokenizer =
        TokenizerFile.read(if (name == "tiny") File(artifact, "tokenizer") else File(folder, "tokenizers/$name"))

    /** A new folder, with a space and letters beyond ASCII in its name; it goes when this JVM does. */
    fun scratch(): File = Files.createTempDirectory("ondevice täst ").toFile().also { folder ->
        Runtime.getRuntime().addShutdownHook(Thread { folder.deleteRecursively() })
    }

    /** A copy of the artifact that a test may damage. */
    fun copyOfArtifact(of: File = artifact): File = File(scratch(), "artifact").also { of.copyRecursively(it) }

    fun ints(value: Any?): IntArray = (value as List<*>).map { (it as Long).toInt() }.toIntArray()

    private fun property(name: String): String = System.getProperty(name) ?: throw AssertionError("run the tests with mvn; the property $name is not set")
}
